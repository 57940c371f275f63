# Two commands do everything: `make serve` and `make test`. Both set up what they need first.

VENV ?= .venv
PYTHON ?= python3
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --quiet

.PHONY: setup serve test lint format bench loadtest clean

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
	@$(PY) -m backend.serve --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) \
		--metrics-port $(METRICS_PORT) -- $(ARGS)

test: setup
	$(PY) -m pytest $(ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint Dockerfile

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: setup
	$(PY) -m loadtests.bench $(ARGS)

loadtest: setup
	$(VENV)/bin/locust -f loadtests/locustfile.py --headless --only-summary \
		--users 16 --spawn-rate 16 --run-time 30s \
		--host http://localhost:$(HTTP_PORT) --grpc-url localhost:$(GRPC_PORT) $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
