# `make demo` and `make test` are all that a fresh Linux machine with python3 and make needs.
# Everything is re-runnable; the virtual environment is made once and renewed when the requirements change.

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -q

# Where to look for torch's CPU build, as an address of wheels that pip takes as an extra index; empty: wherever pip looks.
TORCH_INDEX ?=

# Workers of pytest; files are dealt out as tests/conftest.py orders them. Each may hold several gloo ranks, so more workers than cores gain nothing.
PYTEST_WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder
# The ranks of one test share the cores: one thread each.
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test lint types pytest test-long test-all record notebook figures bench rules models zoo clean

help:
	@echo "make install   the environment .venv, with what the tests and linters need"
	@echo "make demo      train a small GPT on 4 local ranks with a planned, generated step; results in out/"
	@echo "make test      ruff, mypy --strict and the short tests: some cases of every test, under ten minutes on two cores"
	@echo "make test-long the other cases"
	@echo "make test-all  ruff, mypy --strict and all tests"
	@echo "make record    run all tests and note how long each takes, by which the short ones are chosen"
	@echo "make lint      ruff"
	@echo "make types     mypy --strict"
	@echo "make pytest    the short tests alone"
	@echo "make notebook  run notebooks/ and keep the outputs"
	@echo "make figures   draw the figures of README.md and docs/ again"
	@echo "make bench     steps over slow links, beside DDP, FSDP2 and tensor parallelism by hand: docs/performance.md"
	@echo "make rules     write docs/rules.md from the code"
	@echo "make models    measure every model of the zoo again, into docs/models.md"
	@echo "make zoo       try every architecture of transformers, diffusers, torchvision and timm, for hours; docs/zoo.md"
	@echo "make clean     remove the virtual environment and every generated file"

install: $(VENV)/.installed-dev

demo: $(VENV)/.installed
	$(BIN)/shardweave demo --out out

test: lint types pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy --strict shardweave docs benchmarks

pytest: $(VENV)/.installed-dev
	$(PYTEST) --part short

test-long: $(VENV)/.installed-dev
	$(PYTEST) --part long

test-all: lint types
	$(PYTEST)

record: $(VENV)/.installed-dev
	$(PYTEST) --record

notebook: $(VENV)/.installed-dev
	$(BIN)/python docs/run_notebooks.py

figures: $(VENV)/.installed
	$(BIN)/python docs/make_figures.py
	$(BIN)/python -m docs.make_architecture

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.bench

rules: $(VENV)/.installed
	$(BIN)/python -m docs.make_rules

models: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.measure_models

zoo: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.zoo

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "shardweave needs Python 3.11 or newer, but '$(PYTHON)' is missing or older: $$($(PYTHON) --version 2>&1 | head -n 1)."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
	  echo "'$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu, install python3-venv."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python requirements-torch.txt requirements.txt pyproject.toml
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements-torch.txt
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
