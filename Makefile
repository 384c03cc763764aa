# Each target sets itself up: with Python 3.11 or newer on the machine, `make quickstart` or `make test` is all to type.
#
#   make quickstart   a whole run on the CPU, in minutes       make check    lint, types and test
#   make test         the fast tests                           make slow     real runs, processes killed mid-write
#   make lint types   ruff; mypy                               make extras   tests of more extras, and against peers
#   make learning     every algorithm learns its toy
#   make robustness   bad settings, files, runs and code       make clean    remove .venv and caches
#
# PYTHON=python3.12 picks the interpreter, VENV=path the environment, EXTRAS=dev,gpu what is installed with the package.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev

# The fast tests are dealt out by file, the slow ones one by one, the longest first, to more processes than there are cores
# (tests/conftest.py), since many wait for processes of their own. Memory bounds both.
PARALLEL ?= -n auto --maxprocesses 4 --dist loadfile
# Nothing waits here: as many processes as cores, each of which makes the toys once.
LEARNING_PARALLEL ?= -n $(shell nproc)
SLOW_PARALLEL ?= -n auto --maxprocesses 6 --dist loadgroup --no-loadscope-reorder

BIN := $(VENV)/bin
# Named by content and place, not by time: a new clone, other pins, other extras or another checkout of the package install
# anew; a touched file does not. Written last, so an interrupted installation is taken up again.
STAMP := $(VENV)/installed-$(shell (cat pyproject.toml constraints.txt; echo "$(EXTRAS) $(CURDIR)") | cksum | cut -d ' ' -f 1)

.PHONY: quickstart test robustness learning slow extras lint types check install clean
.DEFAULT_GOAL := test

quickstart: $(STAMP)
	$(BIN)/python examples/quickstart.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --durations=10

robustness: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "robustness and not slow" --durations=10

learning: $(STAMP)
	$(BIN)/python -m pytest $(LEARNING_PARALLEL) -m learning --durations=10

slow: $(STAMP)
	$(BIN)/python -m pytest $(SLOW_PARALLEL) -m slow --durations=30

extras:
	@$(MAKE) --no-print-directory install EXTRAS=dev,reasoning-gym,verifiers
	tests/conformance/install_peers.sh $(VENV)
	$(BIN)/python -m pytest -m extras --durations=10

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

install: $(STAMP)

# The older stamps go first, since only the last installation is in place. A venv without pip was left by an interruption.
# Compiled here, as pip compiles what it copies: where Python may not write bytecode, each of a run's processes would do it.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: rftdask needs Python 3.11 or newer, and '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo not found); name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' lacks the venv module; install the system's package for it (Debian, Ubuntu: python3-venv)" >&2; \
	  exit 1; }
	@echo "installing into $(VENV): some minutes and 2 GB the first time"
	@rm -f $(VENV)/installed-*
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@$(BIN)/python -m compileall -q rftdask
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
