# `make` lists the targets. Needs Python >= 3.10 with venv and pip, and a C compiler; the first call installs into .venv: what the
# library needs, and for tests and lint the tools as well.
# setup.py lists the dependencies, constraints.txt the versions that are tested.

PYTHON ?= python3
MPI ?= wheel

ifeq ($(MPI),system)
VENV := .venv-system
EXTRAS := train,bpe,plot
TESTS := tests/comm tests/cli
else
VENV := .venv
EXTRAS := mpi,mkl,train,bpe,plot
TESTS := tests
endif

TOOLS := $(EXTRAS),dev
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
SYSTEM_MPI = $(PYTHON) -c 'import ctypes.util, shutil, sys; sys.exit(not (shutil.which("mpirun") and ctypes.util.find_library("mpi")))'

# Where the environment forbids Python to keep bytecode, each of the Pythons that tests start compiles all tests or the library anew:
# 7 s for each of the three that collect.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all papers lint docs

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  make test MPI=system runs the tests of communication and command line on this machine's own MPI, in .venv-system"

venv: $(VENV)/.tools  ## install library, tests and linters into .venv: minutes, once; 2 GB, or 5 GB where pip takes torch with CUDA
	@:

# $(call install,EXTRAS): makes the environment, and installs the library with these extras in one resolution.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "summa3d needs Python 3.10 or newer; name one with PYTHON=…")'
	@echo "installing summa3d[$(1)] into $(VENV): some minutes, once; 2 GB, or 5 GB where pip takes torch with CUDA"
	@echo "1/2 making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/2 downloading and installing; pip says which package it is at"
	@$(INSTALL) -e '.[$(1)]'
endef

$(VENV)/.installed: setup.py constraints.txt
	$(call install,$(EXTRAS))
	@touch $@

$(VENV)/.tools: setup.py constraints.txt
	$(call install,$(TOOLS))
	@touch $(VENV)/.installed $@

demo: $(VENV)/.installed  ## train a GPT whose samples are words on 8 CPU ranks: minutes
	$(BIN)/summa3d launch -n 8 train demo-words --run runs/demo-words --overwrite \
	    --set scheme=cuboid --set grid.x=2 --set grid.y=2 --set grid.z=2
	$(BIN)/python bench/sample_words.py runs/demo-words

ifeq ($(MPI),system)
test:
	@if $(SYSTEM_MPI); then $(MAKE) --no-print-directory system-test; \
	else echo "skipped: no system MPI is installed (neither mpirun nor libmpi was found)"; fi

.PHONY: system-test
system-test: venv
	$(BIN)/python -m summa3d doctor
	$(BIN)/python -m pytest $(TESTS)
else
test: venv  ## run every test, at every world size
	$(BIN)/python -m pytest $(TESTS)
endif

papers: venv  ## run the tests of papers' tables, fits and claims
	$(BIN)/python -m pytest tests/papers -m 'papers and not wide'

test-all: venv  ## run every combination of every sweep as well, and start a Python for every rank
	$(BIN)/python -m pytest $(TESTS) -m "" --fresh-ranks

lint: venv  ## run ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The site of docs/, in site/; a warning is an error. Its tools have an environment of their own, made once.
DOCS := .venv-docs

$(DOCS)/.installed: setup.py constraints.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS)/.installed  ## build the documentation into site/
	$(DOCS)/bin/zensical build --clean --strict
