# Two commands, `make demo` and `make test`, need only Python 3.11 or newer and make. `make help` lists all.
#
# Every version of Python has an environment of its own (.venvs/3.11, ...). It is made anew when
# pyproject.toml or setup.cfg change; otherwise nothing is installed and no network is needed.

PYTHON ?= python3
# Half as many again as two cores: tests of Ray wait for processes to start and to be missed.
JOBS ?= 3
ARGS ?=

VERSION := $(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ENV := .venvs/$(VERSION)$(if $(OLDEST),-oldest)
BIN := $(ENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
ifdef OLDEST
INSTALL += --constraint $(ENV)/constraints.txt
endif

CHOOSE := autopar needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11

# What the tests compute must not depend on the machine's accelerators. They start many processes,
# Ray's above all: without bytecode, which the environment comes without and which some machines
# forbid to write next to sources, each would compile all of JAX's Python code anew.
PYTEST := JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/$(ENV)/bytecode \
  $(BIN)/pytest --numprocesses=$(JOBS) --dist=worksteal

# What `make check` leaves to `make test`: files that compile many programs or start processes.
SLOW := auto_stages backward_scans checkpoints collectives docs endings examples fuzz localize lower odd_steps \
  pace packaging pages pipelines profile program programs properties random ray ray_faults ray_recovery \
  ray_groups ray_replan real_steps report runs shared_cases slicing solve split_arrays

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: demo test test-all fuzz test-oldest docs notebooks check format clean help

demo: $(ENV)/examples.stamp  ## train a small GPT on eight virtual CPU devices
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(ENV)/dev.stamp  ## run the whole suite on the CPU; ARGS="-k solver" runs a part of it
	$(PYTEST) $(ARGS)

test-all: $(ENV)/dev.stamp  ## run every combination of programs, methods and microbatches
	$(PYTEST) -m "full or not full" $(ARGS)

fuzz: $(ENV)/dev.stamp  ## compare random train steps with plain jax.jit; ARGS="--count 300 --mode stages"
	PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

test-oldest:  ## run the suite with every dependency at its lower bound
	$(MAKE) test OLDEST=1

docs: $(ENV)/dev.stamp  ## build the documentation as a site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Open build/site/index.html"

notebooks: $(ENV)/notebook.stamp  ## run the notebooks of examples/ again, and keep what they show
	JAX_PLATFORMS=cpu $(BIN)/python examples/run_notebooks.py $(ARGS)

check: $(ENV)/dev.stamp  ## lint, formatting, types and the fast part of the suite
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(PYTEST) $(foreach name,$(SLOW),--ignore-glob='*/test_$(name).py') $(ARGS)

format: $(ENV)/dev.stamp  ## mend lint and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove environments, caches and distributions, but not runs/, which holds results
	rm -rf .venvs build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*##/ {printf "make %-12s %s\n", $$1, $$2}' Makefile

$(ENV)/examples.stamp: $(ENV)/created.stamp
	@echo "Installing autopar with what its examples need; the first time takes a few minutes."
	$(INSTALL) --editable '.[examples]'
	@touch $@

$(ENV)/notebook.stamp: $(ENV)/created.stamp
	$(INSTALL) --editable '.[examples,notebook]'
	@touch $@

$(ENV)/dev.stamp: $(ENV)/created.stamp
	@echo "Installing autopar with what its tests need; the first time takes a few minutes."
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(ENV)/created.stamp: pyproject.toml setup.cfg
	@command -v "$(PYTHON)" > /dev/null || { echo "There is no '$(PYTHON)'. $(CHOOSE)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "'$(PYTHON)' is $$("$(PYTHON)" --version 2>&1). $(CHOOSE)" >&2; exit 1; }
	@rm -rf $(ENV)
	"$(PYTHON)" -m venv $(ENV)
	@if [ -n "$(OLDEST)" ]; then $(BIN)/python .ci/lower_bounds.py > $(ENV)/constraints.txt; fi
	@touch $@
