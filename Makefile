# make serve   the router on PORT, and a real prefill and decode pair on this machine's CPU behind it
# make test    lint and everything there is to test, the end-to-end tests against the real pair included
# make lint    ruff and mypy
#
# serve takes PREFILL= and DECODE= (URLs of workers that run already; nothing is built for engines
# then), STORE= (memory:// or redis://…), PORT= and SERVE_ARGS=. TURNBACK_PIP_ARGS= adds arguments
# to every pip install, such as an index that has torch for the CPU.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8000
STORE ?= memory://
PREFILL ?=
DECODE ?=
SERVE_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/ready

.PHONY: serve test lint format setup chromium venv clean
.DEFAULT_GOAL := serve

serve: $(READY)
	@$(PY) -m deploy.local serve $(addprefix --prefill ,$(PREFILL)) $(addprefix --decode ,$(DECODE)) \
	  --store '$(STORE)' --port $(PORT) $(SERVE_ARGS)

# The contract tests mostly wait for something, so several run at once; the real pair needs both cores for itself.
test: lint setup chromium
	$(PY) -m pytest -n 3 tests/unit tests/contract $(PYTEST_ARGS)
	$(PY) -m pytest tests/e2e $(PYTEST_ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The engines' environment (about 4 GB) and the model. Does nothing when they are there.
setup: $(READY)
	@$(PY) -m deploy.local setup

# The browser for the tests of the page. Does nothing when there is one.
chromium: $(READY)
	@$(PY) -m tests.chromium

venv: $(READY)

# Written last, so that an interrupted install is started again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "Python 3.11 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
	@echo "Installing the router's environment ($(VENV)) ..."
	@rm -f $@
	@$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' $(TURNBACK_PIP_ARGS)
	@touch $@

clean:
	rm -rf $(VENV) .local .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

# TTFT of a second turn with and without reuse, the router against the bare protocol; BENCH_ARGS=.
.PHONY: bench-ttft
bench-ttft: setup
	$(PY) -m bench.second_turn $(BENCH_ARGS)

# Conversations on a real pair with and without reuse, without and with a prefix cache on prefill; BENCH_ARGS=.
.PHONY: bench
bench: setup
	$(PY) -m bench.on_pair $(BENCH_ARGS)

# Conversations at random through two routers while workers, connections and the store fail; SEED= replays one.
SEED ?=
TURNS ?= 10000
.PHONY: soak
soak: $(READY)
	$(PY) -m tests.soak --turns $(TURNS) $(addprefix --seed ,$(SEED))

# What the router itself costs, beside other routers, between engines that compute nothing; BENCH_ARGS=. What cannot be
# installed is left out of the comparison, and the report says so.
VLLM_ROUTER := .local/vllm-router
.PHONY: bench-overhead
bench-overhead: $(READY)
	@test -x $(VLLM_ROUTER)/bin/vllm-router || { $(PYTHON) -m venv $(VLLM_ROUTER) \
	  && $(VLLM_ROUTER)/bin/pip install --disable-pip-version-check vllm-router==0.1.17 $(TURNBACK_PIP_ARGS); } || true
	$(PY) -m bench.overhead $(BENCH_ARGS)
