# Two commands to start with: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Extra arguments for pip, such as an index that carries CPU-only builds of torch (see README, Install).
PIP_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo install dev check test format clean

help:
	@echo "make demo     install into .venv, search the bundled pair, show the front (no GPU needed)"
	@echo "make test     the test suite (about eight minutes on two cores)"
	@echo "make check    lint, format and types"
	@echo "make proof-X  the full proof of one part, for X in: $(PROOFS)"

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

install: $(VENV)/.base
dev: $(VENV)/.dev

demo: $(VENV)/.base
	$(BIN)/tuner search search_spaces/bundled.yaml --fresh

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.dev
	$(BIN)/python -m tests

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

PROOFS := pair engine main decoding load lifecycle search dashboard
.PHONY: $(addprefix proof-,$(PROOFS))

proof-pair: $(VENV)/.dev
	$(BIN)/python -m benchmarks.proof pair

proof-engine: $(VENV)/.dev
	$(BIN)/python -m benchmarks.proof engine

proof-main: $(VENV)/.dev
	$(BIN)/python -m benchmarks.proof main

proof-decoding: $(VENV)/.dev
	$(BIN)/python -m benchmarks.proof decoding

proof-load: $(VENV)/.dev
	$(BIN)/python -m benchmarks.proof load

proof-lifecycle: $(VENV)/.dev
	$(BIN)/python -m benchmarks.proof lifecycle

proof-search: $(VENV)/.dev
	$(BIN)/python -m benchmarks.proof search

proof-dashboard: $(VENV)/.dev
	$(BIN)/python -m benchmarks.proof dashboard

clean:
	rm -rf .build .pytest_cache .mypy_cache .ruff_cache .hypothesis
