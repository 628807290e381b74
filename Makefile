VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
MLFLOWS := 3.10.* 3.17.*
PACKAGES := dse simulators search_spaces studies
PYTEST ?= # more words for pytest of `make test` and `make more`, such as --no-skips
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))

CANDIDATES := $(PYTHON) python3.13 python3.12 python3.11 python3
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
VENV_PACKAGE := import sys; print("python%d.%d-venv" % sys.version_info[:2])

.DEFAULT_GOAL := help
.PHONY: help setup extras sweep check fast coverage test more core nightly bench cluster kills million damaged other-user search faults fuzz parity instructions answers docs docs-check format clean
.DELETE_ON_ERROR:

# The tests start hundreds of processes, each of which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(STAMP) ## build .venv with the tested versions of what sweep, check and test need

extras: $(VENV)/.with-everything ## add what only docs, browsers, clusters and benchmarks need (700 MB); torch comes from you

sweep: setup ## run the overlap study end to end
	$(BIN)/python -m dse study=ficco_sweep

check: setup ## check style, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	MYPYPATH=$(subst $(SPACE),:,$(PLUGINS)) $(BIN)/mypy --cache-dir .mypy_cache/with-plugins
	$(BIN)/python -m benchmarks.import_rules

fast: setup ## run the quick half of the tests (a minute and a half on two cores)
	$(BIN)/pytest -n auto --dist worksteal --hypothesis-profile ci -m 'not slow and not more and not nightly'

coverage: $(VENV)/.with-coverage ## print the branch coverage of the quick half of the tests (four minutes)
	$(BIN)/pytest -n auto --dist worksteal -m 'not slow and not more and not nightly' $(PACKAGES:%=--cov=%) $(patsubst %,--cov=%,$(notdir $(wildcard plugins/*/dse_*))) --cov-branch --cov-report=term

test: check ## check, then run the tests, with the same drawn examples every time (six minutes on two cores)
	$(BIN)/pytest -n 2 --dist worksteal --hypothesis-profile ci $(PYTEST)

more: setup ## run the longer tests, and a seventh of the nightly ones, by the day of the week (twenty minutes or more)
	$(BIN)/pytest -n 2 --dist worksteal --hypothesis-profile more -m 'more and not nightly or tonight' $(PYTEST)

core: setup ## run the core's tests in an environment in which no plug-in is installed
	rm -rf .core && $(BIN)/python -m venv --without-pip .core
	for path in $(VENV)/lib/python*/site-packages/*; do \
	    case $$path in *overlap_dse_*) ;; *) ln -s "$$PWD/$$path" .core/lib/python*/site-packages/ || exit 1 ;; esac; \
	done
	.core/bin/python -m pytest tests -n 2 --dist worksteal --hypothesis-profile ci; status=$$?; rm -rf .core; exit $$status

nightly: setup ## run the tests that are too many for every time, and new drawn examples (half an hour)
	$(BIN)/pytest -n 2 --dist worksteal -m nightly
	$(BIN)/pytest -n 2 --dist worksteal -m 'hypothesis and not nightly'

bench: setup ## time the engines side by side, write docs/project/benchmarks.md, and show how counts of instructions and calls went
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.instructions --history

faults: setup ## inject every fault of the survival matrix and record the outcomes
	$(BIN)/python -m tests.campaigns.faults

parity: setup ## test tracking with the oldest and the newest MLflow that are allowed
	for mlflow in $(MLFLOWS); do \
	    $(BIN)/python -m venv --clear .parity && \
	    .parity/bin/python -m pip install --quiet --disable-pip-version-check "mlflow==$$mlflow" -e '.[dev]' && \
	    .parity/bin/python -m pip list --disable-pip-version-check | grep '^mlflow ' && \
	    .parity/bin/python -m pytest tests/test_tracking.py tests/test_shared_views.py || exit 1; \
	done; rm -rf .parity

cluster: $(VENV)/.with-dask ## kill parts of a cluster, restart its database, cut its links (as root), and time it
	$(BIN)/python -m benchmarks.cluster

kills: setup ## kill studies hundreds of times (a quarter of an hour) and record that nothing was lost
	$(BIN)/python -m benchmarks.kills --record

million: setup ## time commands on a store of a million results (five minutes)
	$(BIN)/python -m benchmarks.million

damaged: setup ## damage pages and files of stores and type commands on them (ten minutes)
	$(BIN)/python -m tests.campaigns.damaged

other-user: setup ## run the tests of security as nobody (as root, four minutes)
	$(BIN)/python -m tests.campaigns.other_user

search: $(VENV)/.with-rivals ## hold every search method against known fronts (twenty-five minutes) and record it
	$(BIN)/python -m benchmarks.search --record

fuzz: setup ## try 1,000 broken configurations, command lines, folders and strangers' files (some twenty minutes)
	$(BIN)/python -m benchmarks.fuzz --cases 1000

instructions: setup ## count the instructions of fixed workloads under Valgrind (more than ten minutes) and tell what rose
	$(BIN)/python -m benchmarks.instructions

answers: setup ## count wrong answers: silent numbers, stale results, calibrations off, studies that do not answer (half an hour)
	$(BIN)/python -m benchmarks.answers

docs: $(VENV)/.with-docs $(VENV)/.with-charts ## serve the documentation on 127.0.0.1:8000
	$(DOCS) serve

docs-check: $(VENV)/.with-docs $(VENV)/.with-charts ## build the documentation strictly, run its tutorial and its notebooks (two minutes)
	$(DOCS) build --strict --quiet
	$(BIN)/python -m benchmarks.tutorial
	$(BIN)/python -m benchmarks.notebooks

format: setup ## fix style where that is safe
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove caches and build products (.venv and results stay)
	rm -rf build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt $(PLUGINS:%=%/pyproject.toml) | $(BIN)/python
	@echo "setup: installing dse and its dependencies into $(VENV) (half a minute the first time)"
	@$(BIN)/python -m benchmarks.install dev
	@echo "setup: compiling kernels, once"
	@$(BIN)/python -m benchmarks.kernels
	@touch $@

# What a target needs beyond `make setup`: an extra of this project or of its plug-ins, or everything.
$(VENV)/.with-%: $(STAMP)
	@echo "setup: adding $* to $(VENV)"
	@$(BIN)/python -m benchmarks.install $*
	@touch $@

# A candidate counts if it runs (a pyenv shim may not), is supported and can build an environment.
$(BIN)/python:
	@python= incomplete=; \
	for candidate in $(CANDIDATES); do \
	    "$$candidate" -c '$(SUPPORTED)' 2>/dev/null || continue; \
	    if "$$candidate" -c 'import ensurepip, venv' 2>/dev/null; then python=$$candidate; break; fi; \
	    incomplete=$${incomplete:-$$candidate}; \
	done; \
	if [ -z "$$python" ]; then \
	    package='python3 python3-venv'; \
	    [ -z "$$incomplete" ] || package=$$("$$incomplete" -c '$(VENV_PACKAGE)'); \
	    echo "setup: Python 3.11, 3.12 or 3.13 with venv is needed: apt-get install $$package" >&2; \
	    exit 1; \
	fi; \
	echo "setup: creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV) && { $(BIN)/python -m pip uninstall --quiet --yes setuptools 2>/dev/null || true; }
