# make venv | demo | test | test-all | lint | docs. Needs Python >= 3.10 with venv and pip, and a C compiler; the first call installs
# into .venv.
# make test MPI=system runs the communication and command-line tests on the machine's own MPI, in .venv-system.
# setup.py lists the dependencies, constraints.txt the versions that are tested.

PYTHON ?= python3
MPI ?= wheel

ifeq ($(MPI),system)
VENV := .venv-system
EXTRAS := train,bpe,plot,dev
TESTS := tests/comm tests/cli
else
VENV := .venv
EXTRAS := mpi,mkl,train,bpe,plot,dev
TESTS := tests
endif

STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
SYSTEM_MPI = $(PYTHON) -c 'import ctypes.util, shutil, sys; sys.exit(not (shutil.which("mpirun") and ctypes.util.find_library("mpi")))'

.PHONY: venv demo test test-all lint docs

venv: $(STAMP)
	@:

$(STAMP): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "summa3d needs Python 3.10 or newer; name one with PYTHON=…")'
	@echo "installing summa3d[$(EXTRAS)] into $(VENV) (this takes some minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: venv
	$(BIN)/summa3d launch -n 8 train demo --run runs/demo --overwrite \
	    --set scheme=cuboid --set grid.x=2 --set grid.y=2 --set grid.z=2

ifeq ($(MPI),system)
test:
	@if $(SYSTEM_MPI); then $(MAKE) --no-print-directory system-test; \
	else echo "skipped: no system MPI is installed (neither mpirun nor libmpi was found)"; fi

.PHONY: system-test
system-test: venv
	$(BIN)/python -m summa3d doctor
	$(BIN)/python -m pytest $(TESTS)
else
test: venv
	$(BIN)/python -m pytest $(TESTS)
endif

# Run all cases of every sweep, where `make test` covers pairs of parameters only, and start a new Python for every rank.
test-all: venv
	$(BIN)/python -m pytest $(TESTS) -m "" --fresh-ranks

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The site of docs/, in site/; a warning is an error. Its tools have an environment of their own, made once.
DOCS := .venv-docs

$(DOCS)/.installed: setup.py constraints.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS)/.installed
	$(DOCS)/bin/zensical build --clean --strict
