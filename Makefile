# Two commands: `make serve` and `make test`. Each sets everything up first; a second run finds it done.
# Needs make and Python 3.11 or later, nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
CONFIG ?= deploy/tiny.yaml
# MODEL=folder PORT=8000 HOST=127.0.0.1 override the configuration file
MODEL  ?=
PORT   ?=
HOST   ?=
PYTEST_ARGS ?=

# Other packages ask for "torch" without a version: it is installed first, by name. A CPU build brings no triton, a
# CUDA build brings its own.
TORCH  := torch==2.13.0
TRITON := triton==3.6.0
NUMPY  := numpy<2.4

BIN   := $(VENV)/bin
STAMP := $(VENV)/.isthmus-installed
CLIENTS       := $(VENV)-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
BEGUN := $(VENV)/.isthmus-begun
PIP   := $(BIN)/python -m pip install --disable-pip-version-check $(if $(CI),--progress-bar off --quiet) -c constraints.txt

.PHONY: serve test test-long mutants check lint gate format venv clients clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo "make serve      set up, then serve the tiny model on http://127.0.0.1:8000   [PORT= MODEL= HOST= CONFIG=]"
	@echo "make test       set up, then run the tests                                   [PYTEST_ARGS=]"
	@echo "make test-long  the tests that take longer than CI allows"
	@echo "make mutants    plant each fault of tests/mutants in a copy and show the test that sees it"
	@echo "make check      make lint: formatting, lint, types;  make gate: GPU kernels compiled offline;  make format  fixes"
	@echo "make clients    set up the clients by others that tests use; make test does it"
	@echo "make venv       set up only;                 make clean   removes what was set up"

serve: $(STAMP)
	@$(BIN)/isthmus up $(CONFIG) $(if $(MODEL),--model "$(MODEL)") $(if $(PORT),--port $(PORT)) $(if $(HOST),--host $(HOST))

test: $(STAMP) clients
	ISTHMUS_TEST_CLIENTS=$(CLIENTS)/bin $(BIN)/python -m pytest -m "not long and not gpu and not multi_gpu" $(PYTEST_ARGS)

test-long: $(STAMP) clients
	ISTHMUS_TEST_CLIENTS=$(CLIENTS)/bin $(BIN)/python -m pytest -m "long and not gpu and not multi_gpu" $(PYTEST_ARGS)

mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py

check: lint gate

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

gate: $(STAMP)
	$(BIN)/python -m kernels.check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(STAMP)

# BEGUN without STAMP is an installation that was interrupted: pip may take its half-written packages for whole ones, so
# it starts again from an empty environment (downloads come from pip's cache).
$(STAMP): pyproject.toml constraints.txt Makefile
	@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Isthmus needs Python 3.11 or later; found '$(PYTHON)'. Say which with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if test -e $(BEGUN) || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "==> $(VENV): a new environment with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv --clear $(VENV); fi
	@touch $(BEGUN)
	@echo "==> $(TORCH)"
	@$(PIP) "$(TORCH)" "$(NUMPY)"
	@if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then \
		echo "==> $(TRITON), since this torch is a CPU build"; $(PIP) "$(TRITON)"; fi
	@echo "==> Isthmus and what it needs"
	@$(PIP) "$(TORCH)" "$(NUMPY)" -e ".[dev]"
	@rm $(BEGUN) && touch $(STAMP)
	@echo "==> installed into $(VENV)"

# Tests point clients by others at the router. They live apart: nothing of ours may lean on the 140 packages they bring.
clients: $(CLIENTS_STAMP)

$(CLIENTS_STAMP): tests/clients/requirements.txt
	@echo "==> clients by others, for tests, in $(CLIENTS)"
	@"$(PYTHON)" -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps \
		$(if $(CI),--progress-bar off --quiet) -r tests/clients/requirements.txt
	@touch $(CLIENTS_STAMP)

clean:
	rm -rf $(VENV) $(CLIENTS) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
