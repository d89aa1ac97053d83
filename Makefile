# `make help` lists the targets. Windows and notebooks: the plain pip lines stand in README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SLOW := $(if $(filter true,$(CI)),,-m "not slow")

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint types check results bench clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(BIN)/vit: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $(BIN)/vit

install: $(BIN)/vit  ## make .venv if it is missing, and install the package with its tools

quickstart: install  ## fine-tune on real digits, then test: two minutes on a laptop
	$(BIN)/vit fit --config quickstart
	$(BIN)/vit test outputs/quickstart

test: install  ## run the tests (slow ones too where CI=true)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(SLOW)

lint: install  ## check style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install  ## check types
	$(BIN)/mypy

check: lint types test  ## all that CI runs

results: install  ## write docs/results.md from docs/records
	$(BIN)/python benchmarks/results.py

bench: install  ## measure the quickstart and the start-up again, and write docs/results.md
	$(BIN)/python benchmarks/quickstart.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/results.py

clean:  ## remove caches and builds; outputs/ stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
