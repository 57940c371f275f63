# Two commands do everything: `make serve` and `make test`. Both set up what they need first.

VENV ?= .venv
PYTHON ?= python3
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --quiet
CLIENTS := $(VENV)-clients
CLIENTS_PIP := $(CLIENTS)/bin/python -m pip install --disable-pip-version-check --quiet

.PHONY: setup clients serve test test-aiperf lint format bench bench-front bench-peers peers pressure loadtest soak tune gains roundtrip gpu-check roofline cpu-steps quality kernel-table clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.txt requirements-dev.txt requirements-server.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 11) <= v < (3, 14))' || \
		{ echo "error: Python 3.11 to 3.13 is needed; name one: make setup PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: Python's venv is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps -r requirements-server.txt
	$(PIP) --no-deps --editable .
	@touch $@

serve: setup
	@$(PY) -m tritium.backend.host.serve --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) \
		--metrics-port $(METRICS_PORT) -- $(ARGS)

# Other people's clients, for tests; their requirements are not those of the engine.
clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: requirements-clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS_PIP) -r requirements-clients.txt
	@touch $@

test: setup clients
	$(PY) -m pytest $(ARGS)

# Not part of `test`: aiperf brings 1 GB of packages.
test-aiperf: setup clients
	$(CLIENTS_PIP) aiperf==0.13.0
	$(PY) -m pytest tests/server/test_third_party.py -k aiperf $(ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint Dockerfile

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: setup
	$(PY) -m tritium.loadtests.bench $(ARGS)

bench-peers: setup peers
	$(PY) -m tritium.loadtests.peers $(ARGS)

# Each in an environment of its own beside ours; one that can't be installed is told and left out.
PEERS ?= vllm vllm-backend openvino llamacpp
peers: $(foreach peer,$(PEERS),$(VENV)-$(peer)/.tried)

$(VENV)-%/.tried: requirements-peers-%.txt
	@$(PYTHON) -m venv $(VENV)-$*
	@if CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF" \
		$(VENV)-$*/bin/python -m pip install --disable-pip-version-check --quiet -r $<; \
	then $(VENV)-$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	else echo "without $*: it could not be installed; its requirements are in $<"; rm -rf $(VENV)-$*/bin; fi
	@touch $@

PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))

# vLLM's own environment, but with the numpy that the Python backend's stub needs; and a locale,
# which the stub sets none of: torch reads sources of its own in the locale's encoding.
$(VENV)-vllm-backend/.tried: $(VENV)-vllm/.tried
	@mkdir -p $(VENV)-vllm-backend
	@if [ -e $(VENV)-vllm/bin/python ] && $(PYTHON) -m venv $(VENV)-vllm-backend && \
		$(VENV)-vllm-backend/bin/python -m pip install --disable-pip-version-check --quiet numpy==1.26.4; \
	then { echo 'import locale; locale.setlocale(locale.LC_CTYPE, "C.UTF-8")'; \
		$(VENV)-vllm/bin/python -c '$(PACKAGES)'; \
	} > $$($(VENV)-vllm-backend/bin/python -c '$(PACKAGES)')/vllm.pth; \
	else echo "without vllm-backend: it needs vllm and numpy"; rm -rf $(VENV)-vllm-backend/bin; fi
	@touch $@

bench-front: setup
	$(PY) -m tritium.loadtests.front $(ARGS)

# Bursts, classes, long prompts, a small KV cache: ten minutes on two cores; ARGS=long for one part
pressure: setup
	$(PY) -m tritium.loadtests.pressure $(ARGS)

# 30 s of made-up traffic against a served model
loadtest: setup
	$(PY) -m tritium.loadtests synthesize results/loadtest.jsonl --requests 120 --rate 4 --dispersion 3 \
		--input-length 100 400 --output-length 30 100 --hit-ratio 0.3
	$(PY) -m tritium.loadtests replay results/loadtest.jsonl --url localhost:$(GRPC_PORT) \
		--metrics-url http://localhost:$(METRICS_PORT)/metrics --output results/loadtest $(ARGS)

# 10,000 requests of all kinds, or 20 minutes; failing steps, and SIGTERM at the end
soak: setup
	$(PY) -m tritium.loadtests.soak $(ARGS)

# Which limits suit a trace: make tune ARGS="trace.jsonl --slo-ttft-ms 500 --slo-tpot-ms 100"
tune: setup
	$(PY) -m tritium.loadtests.tune $(ARGS)

# What each idea gains on a trace: make gains ARGS="trace.jsonl --input-scale 0.25"
gains: setup
	$(PY) -m tritium.loadtests.gains $(ARGS)

# A trace under locust, captured by the server, replayed, captured again: make roundtrip ARGS="trace.jsonl"
roundtrip: setup
	$(PY) -m tritium.loadtests.roundtrip $(ARGS)

# At most 10 minutes on one GPU; also without this environment: python3 -m tritium.benchmarks.gpu_check
gpu-check: setup
	$(PY) -m tritium.benchmarks.gpu_check $(ARGS)

roofline: setup
	$(PY) -m tritium.benchmarks.roofline $(ARGS)

# What a step costs on CPU, in bfloat16, int8 and int4, and how that grows
cpu-steps: setup
	$(PY) -m tritium.benchmarks.cpu_steps

# What int8 and int4 weights do to a model's answers
quality: setup
	$(PY) -m tritium.benchmarks.quality

kernel-table: setup
	$(PY) -m tritium.benchmarks.pages

clean:
	rm -rf $(VENV) $(CLIENTS) $(PEERS:%=$(VENV)-%) build *.egg-info
