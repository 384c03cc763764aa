# Each target installs what it needs; the machine needs only Python 3.11 or newer.
#
#   make quickstart   a whole run on the CPU, in minutes       make check    lint, types and test
#   make test         the fast tests                           make slow     real runs, processes killed mid-write
#   make lint types   ruff, layers, prose; mypy                make extras   tests of more extras, and against peers
#   make learning     every algorithm learns its toy         make test-oldest  the fast tests on the oldest PyTorch
#   make guides       examples, notebooks, pages, the wheel   make site      the documentation as web pages, in build/site
#   make robustness   bad settings, files, runs and code       make gpu      GPU measurements, into docs/gpu.md
#   make clean        remove .venv and caches                 make long     the longest tests, not in CI
#   make steady N=20  the fast tests N times on a busy machine, not in CI
#   make findings     surprises of other libraries, shown without this package; not in CI
#   make fuzz         20,000 arbitrary requests to `rftdask serve`, some by Schemathesis; not in CI
#
# PYTHON=python3.12 selects the interpreter, VENV=path the environment, EXTRAS=dev,gpu the extras of the package;
# EXTRAS= is the light installation of a login node, without torch.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev

# Fast tests are distributed by file, slow ones individually, in the order of tests/conftest.py. Many wait for their own
# processes, so there are more workers than cores; memory limits the number.
PARALLEL ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# These tests do not wait, so there are as many workers as cores; each creates the toys once.
LEARNING_PARALLEL ?= -n $(shell nproc)
# Most of these are sequences of runs in one process, which use a core and a half.
GUIDES_PARALLEL ?= -n $(shell expr 3 \* $$(nproc) / 2) --dist loadgroup --no-loadscope-reorder
SLOW_PARALLEL ?= -n auto --maxprocesses 6 --dist loadgroup --no-loadscope-reorder

BIN := $(VENV)/bin
# The machine's own environment with its torch, vLLM and dask-cuda.
GPU_PYTHON ?= python
# Named by content and path: new pins, extras or another checkout reinstall, a touched file does not. Written last, so
# an interrupted installation is repeated.
STAMP := $(VENV)/installed-$(shell (cat pyproject.toml constraints.txt; echo "$(EXTRAS) $(CURDIR)") | cksum | cut -d ' ' -f 1)

.PHONY: agentscope findings fuzz gpu torchao site quickstart test steady test-oldest robustness learning guides slow long extras lint types check install clean
.DEFAULT_GOAL := test

findings:
	@findings/run_all

quickstart: $(STAMP)
	$(BIN)/python examples/quickstart.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --durations=10

# Manual, if pip offers this torch: PyPI has no CPU build of it. With its CUDA libraries it needs 8 GB of disk.
OLDEST := torch==2.11.0 transformers==5.16.1
test-oldest:
	@$(PYTHON) -m venv $(VENV)-oldest
	grep -vE '^(torch|transformers|huggingface[-_]hub)==' constraints.txt >$(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)-oldest/constraints.txt $(OLDEST) -e ".[dev]"
	$(VENV)-oldest/bin/python -m pytest $(PARALLEL) tests/unit

N ?= 20
steady: $(STAMP)
	$(BIN)/python -m tests.steady $(N) $(PARALLEL)

# Schemathesis needs another pytest.
FUZZ ?= 20000
fuzz: $(STAMP)
	@$(PYTHON) -m venv $(VENV)-fuzz
	$(VENV)-fuzz/bin/python -m pip install --quiet --disable-pip-version-check schemathesis==4.32.5
	$(BIN)/python -m tests.integration.serving.test_fuzzed_requests --requests $(FUZZ) --schemathesis $(VENV)-fuzz/bin/st

robustness: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "robustness and not slow" --durations=10

learning: $(STAMP)
	$(BIN)/python -m pytest $(LEARNING_PARALLEL) -m learning --durations=10

guides: $(STAMP)
	$(BIN)/python -m pytest $(GUIDES_PARALLEL) -m "guides and not long" --durations=10

MARKS ?= slow
slow: $(STAMP)
	$(BIN)/python -m pytest $(SLOW_PARALLEL) -m "($(MARKS)) and not long" --durations=30

long: $(STAMP)
	$(BIN)/python -m pytest $(SLOW_PARALLEL) -m "long or (long and extras)" --durations=30

site: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going docs build/site

WIDE := dev,agents,openenv,reasoning-gym,sciworld,textarena,tinker,trackers,verifiers
extras:
	@$(MAKE) --no-print-directory install EXTRAS=$(WIDE)
	tests/conformance/install_peers.sh $(VENV)
	@$(MAKE) --no-print-directory agentscope EXTRAS=$(WIDE)
	$(BIN)/python -m pytest -m "extras and not long" --durations=10

# Its mcp is installed outside of the environment, where verifiers needs another version.
agentscope: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "agentscope<2" greenlet
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/mcp1 "mcp<2"
	PYTHONPATH=$(VENV)/mcp1 $(BIN)/python -m pytest -m extras -k agentscope \
	  tests/unit/compat/test_trinity_wheel.py tests/unit/rollouts/workflows/test_workflows_page.py

torchao:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/torchao -c constraints.txt torchao
	PYTHONPATH=$(VENV)/torchao $(BIN)/python -m pytest -m "" -k "bits or narrow or bfloat16" \
	  tests/unit/trainer/engines/test_optimizer.py tests/e2e/training/test_optimizers_over_ranks.py

# On a machine with a GPU and its extras; PART="a b" runs some parts. Appends rows to the table of docs/gpu.md. TINY=1
# tests the script on a CPU without valid numbers.
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(TINY),--tiny,--append docs/gpu.md) $(if $(PART),--parts $(PART))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m project

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

install: $(STAMP)

# Older stamps are removed first, since only the last installation is valid. A venv without pip comes from an
# interruption. compileall: if Python cannot write bytecode later, each process of a run would compile the package.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: rftdask needs Python 3.11 or newer, and '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo not found); name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' lacks the venv module; install the system's package for it (Debian, Ubuntu: python3-venv)" >&2; \
	  exit 1; }
	@echo "installing into $(VENV): a few minutes and 2 GB the first time"
	@rm -f $(VENV)/installed-*
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$(if $(EXTRAS),[$(EXTRAS)])"
	@$(BIN)/python -m compileall -q rftdask
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
