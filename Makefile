# The habits of this project, one target each. Needs only make and Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What pip installs: the pinned versions. `test-newest` installs the newest of all, into an environment of its own.
LIBRARIES := -c constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(LIBRARIES)
# One more than there are cores: some tests wait for processes and clocks, and others run meanwhile.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
.DEFAULT_GOAL := help

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(VENV)/.core            ## set up, then train networks that sort and draw sprites
	$(BIN)/hotloop demo

test: $(VENV)/.dev             ## set up, then run every test that needs no GPU
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --timeout 300

test-failed:                   ## the tests that failed last, again, one after the other
	$(BIN)/python -m pytest -q -n 0 --timeout 300 --last-failed --last-failed-no-failures none

test-newest:                   ## the same with the newest torch (CUDA libraries, several GB) and libraries that pip has
	rm -f .venv-newest/.core .venv-newest/.dev
	$(MAKE) test VENV=.venv-newest LIBRARIES='--upgrade --upgrade-strategy eager'

lint: $(VENV)/.dev             ## ruff, mypy (strict), and the layers of the architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev           ## let ruff fix and format what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test:                      ## the tests that need a CUDA GPU, with the Python and torch at hand
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

bench: $(VENV)/.bench          ## time training loops, pixel operations, streams and overheads on this machine
	PYTHONPATH=benchmarks $(BIN)/python -m harness --expert benchmarks/expert --out benchmarks/results
	$(BIN)/python benchmarks/pixel_ops.py
	$(BIN)/python benchmarks/streams.py
	$(BIN)/python benchmarks/overheads.py

docs: $(VENV)/.docs            ## build the documentation into site/, any warning is an error
	$(BIN)/zensical build --clean --strict

clean:                         ## remove everything that can be made again
	rm -rf $(VENV) .venv-newest site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hotloop needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "On Debian or Ubuntu: sudo apt install python3-venv"; exit 1; }

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.core $@

$(VENV)/.bench: $(VENV)/.core
	$(INSTALL) -e '.[bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(INSTALL) -e '.[docs]'
	@touch $@

.PHONY: help demo test test-failed test-newest lint format gpu-test bench docs clean
