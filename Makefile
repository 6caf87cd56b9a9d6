# `make demo` and `make test` build .venv on the first call, and change nothing else on the machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-all smoke docs bench lint types check-format install clean

demo: $(VENV)/.run
	$(BIN)/fedbilevel demo

PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
NOTED := $(VENV)/noted

test: install lint types
	rm -rf $(NOTED)
	FEDBILEVEL_NOTED=$(NOTED) $(PYTEST) -n 3 -m "not slow"

test-slow: install # after `make test`, whose notes of provoked errors it completes
	FEDBILEVEL_NOTED=$(NOTED) FEDBILEVEL_ALL_NOTED=1 $(PYTEST) -n 3 -m slow

test-all: test
	$(MAKE) test-slow

smoke: $(VENV)/.run
	OMP_NUM_THREADS=1 $(BIN)/python tests/smoke.py

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "Open site/index.html"

bench: install
	$(BIN)/python -m benchmarks $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

install: $(VENV)/.dev

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("fedbilevel needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV)
