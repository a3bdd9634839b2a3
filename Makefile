# Everything runs in a virtual environment at the root; the first target that needs it makes it.
#   make test PYTEST_ARGS="-k merge -x"     choose tests
#   make venv PYTHON=python3.12             another interpreter

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
INDEX_BENCH_ARGS ?=
HITRATE_ARGS ?=

NEXT_VENV ?= .venv-omni-next
BIN := $(VENV)/bin
STAMP := $(VENV)/.made
NEXT_STAMP := $(NEXT_VENV)/.made
PYTEST := $(BIN)/python -m pytest

# The engine must neither look for models on the network nor report its use.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo lint format test test-fast test-engine venv-omni-next test-omni-next soak bench bench-hitrate bench-diffusion proto clean distclean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{ printf "  make %-16s %s\n", $$1, $$2 }'

$(STAMP): pyproject.toml constraints.txt tools/make_venv.sh tools/check_venv.py tools/engine-requirements.txt
	@bash tools/make_venv.sh $(VENV) $(PYTHON)
	@touch $@

venv: $(STAMP) ## make .venv: stagecache, its tools, vLLM and vLLM-Omni for a CPU (2 to 4 minutes, 2 GB)

demo: $(STAMP) ## start a daemon, run a workload against it and show what it saves
	@$(BIN)/stagecache demo $(DEMO_ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(STAMP) ## all tests but the soak, fast ones first
	$(PYTEST) -m "not soak" $(PYTEST_ARGS)

test-fast: $(STAMP) ## tests that need no engine, no kills and no patience
	$(PYTEST) -m "not (slow or crash or engine or soak)" $(PYTEST_ARGS)

test-engine: $(STAMP) ## tests against the real vLLM engine and vLLM-Omni runner
	$(PYTEST) -m "engine and not soak" $(PYTEST_ARGS)

$(NEXT_STAMP): constraints.txt pyproject.toml tools/make_venv_omni_next.sh tools/omni-next-constraints.txt tools/engine-requirements.txt
	@bash tools/make_venv_omni_next.sh $(NEXT_VENV) $(PYTHON)
	@touch $@

venv-omni-next: $(NEXT_STAMP) ## an environment for vLLM-Omni 0.32.0rc1 (2 GB)

test-omni-next: $(NEXT_STAMP) ## tests/omni against vLLM-Omni 0.32.0rc1
	$(NEXT_VENV)/bin/python -m pytest tests/omni $(PYTEST_ARGS)

soak: $(STAMP) ## long random runs: kills, fuzz, 30 minutes of load with faults (docs/reliability.md)
	$(PYTEST) -m soak $(PYTEST_ARGS)

bench: $(STAMP) ## the figures of docs/performance.md and of the index of shared blocks, measured on this machine
	@$(BIN)/stagecache bench $(BENCH_ARGS)
	@$(BIN)/python bench/index/bench_index.py $(INDEX_BENCH_ARGS) || echo "the index of shared blocks missed a promise, see above"

bench-hitrate: $(STAMP) ## the real engine with prefix caching off and on, at hit rates of 0 to 80 %, with the shim and without
	@$(BIN)/python -m bench.engine.hit_rates $(HITRATE_ARGS)

bench-diffusion: $(STAMP) ## a diffusion stage without a cache, paged, and with prefix caching
	@$(BIN)/python -m bench.diffusion $(BENCH_ARGS)

proto: $(STAMP) ## generate the stubs again after a change of the .proto file
	$(BIN)/python tools/gen_proto.py

.PHONY: dist
dist: $(STAMP) ## build sdist and wheel into dist/, the same bytes for the same commit
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 1767225600) $(BIN)/python -m hatchling build

clean: ## remove caches and build output, keep the environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . \( -path ./$(VENV) -o -path ./$(NEXT_VENV) \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove the environment
	rm -rf $(VENV) $(NEXT_VENV)
