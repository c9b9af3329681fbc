# make demo    set up .venv and train a vision-language model on handwritten digits, two workers on CPU
# make test    set up .venv, lint, and run all tests
# make lint    format check, ruff, mypy
# make lock    write requirements.lock anew from pyproject.toml
# make map     write the list of files in README.md anew
#
# PYTHON=python3.12    which Python makes .venv (3.11 or newer)
# PIP_ARGS="..."       more arguments for pip, such as --index-url of a CPU-only index of torch
# WORKERS=2            test processes

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
WORKERS ?= 2
TORCH ?= 2.13.0
RUN := $(VENV)/bin/python
SETUP := $(VENV)/.installed

# One thread per process: tests and workers are processes of their own.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint lock map clean

demo: $(SETUP)
	@echo "Training a small vision-language model to read handwritten digits, on two workers."
	@echo "language/answers is the share of digits that it reads right."
	$(RUN) -m pipeweaver train examples/digits.toml --overwrite

test: lint
	$(RUN) -m pytest -n $(WORKERS)

lint: $(SETUP)
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m mypy

$(SETUP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pipeweaver needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Local builds ("2.13.0+cpu") and what a CUDA build of torch brings along are left out: pip finds the build
# that suits the machine.
lock:
	$(PYTHON) -m venv --clear $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet $(PIP_ARGS) torch==$(TORCH) setuptools
	$(VENV)-lock/bin/python -m pip install --quiet $(PIP_ARGS) "torch==$(TORCH)" ".[dev,tensorboard,tokenizers]"
	{ echo "# Everything that make installs. Written by make lock."; \
	  $(VENV)-lock/bin/python -m pip freeze --all --exclude pip --exclude pipeweaver \
	  | sed -E 's/\+[A-Za-z0-9.]+$$//' | grep -vE '^(nvidia|cuda|triton)'; } > requirements.lock
	rm -rf $(VENV)-lock build *.egg-info

map:
	$(PYTHON) docs/map.py

clean:
	rm -rf $(VENV) $(VENV)-lock build runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
