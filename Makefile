VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0

TESTS ?= tests
PYTEST_ARGS ?=
# How many tests run at once. A training takes a core and up to 5 GB.
WORKERS ?= 2
BENCH_ARGS ?=
DEMO_ARGS ?=

PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --no-input --disable-pip-version-check
# The tests of a file share their recordings. In folder order the long files come first.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The stamp's name holds a checksum of what is installed: another setup.cfg is another stamp.
STAMP := $(VENV)/.ready-$(shell (cat setup.cfg; echo '$(TORCH)') | cksum | cut -d' ' -f1)
DOCS_STAMP := $(STAMP)-docs

.DEFAULT_GOAL := help
.PHONY: help setup browser test test-all test-rest test-versions lint format bench bench-store bench-trainings demo tour docs clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | \
		awk -F'\t' '{ printf "  %-18s %s\n", $$1, $$2 }'

setup: $(STAMP) ## create the virtual environment (VENV, PYTHON) and install everything, once

# torch first and alone: verl would bring a CUDA build and gigabytes of nvidia packages with it.
# An environment without a stamp (an interrupted set-up) is completed, not made anew.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' || \
		{ echo '$(PYTHON) is not Python 3.10 to 3.12: choose one with make PYTHON=...' >&2; exit 1; }
	@echo '==> virtual environment: $(VENV)'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo '==> installing $(TORCH)'
	@$(PIP_INSTALL) '$(TORCH)'
	@echo '==> installing verl-rollout-skip with verl and the development tools (a few minutes)'
	@$(PIP_INSTALL) '$(TORCH)' -e '.[verl,dev]'
	@if $(PY) -m pip freeze | grep -q '^torch==.*+cpu' && $(PY) -m pip freeze | grep '^nvidia-'; then \
		echo 'CUDA packages (above) came beside a CPU build of torch: remove $(VENV) and set up again' >&2; \
		exit 1; \
	fi
	@rm -f $(VENV)/.ready-*
	@touch $@
	@echo '==> ready'

$(DOCS_STAMP): $(STAMP)
	@echo '==> installing the documentation tools'
	@$(PIP_INSTALL) '$(TORCH)' -e '.[docs]'
	@touch $@

test: setup ## run the quick tests before every commit (TESTS=tests/unit PYTEST_ARGS='-k name -x')
	$(PYTEST) -m 'not slow' $(TESTS) $(PYTEST_ARGS)

test-all: setup browser ## run every test at full depth: all trainings, fault storms, fuzzing, browser, documents
	$(PYTEST) --hypothesis-profile=full $(TESTS) $(PYTEST_ARGS)

test-rest: setup browser ## run what test-all adds to test
	$(PYTEST) -m 'slow or hypothesis' --hypothesis-profile=full $(TESTS) $(PYTEST_ARGS)

# Older versions of verl have an environment each. numpy 2, pyarrow 22 and transformers 5 came after them.
VERSIONS ?= 0.8.0 0.7.1 0.6.1
OLD := 'numpy<2' 'pyarrow<22' 'transformers<5' cachetools fastapi openai uvicorn hypothesis pytest pytest-mock pytest-timeout psutil

.PRECIOUS: .venv-verl-%/.ready
.venv-verl-%/.ready: setup.cfg
	@echo '==> environment for verl $*: .venv-verl-$*'
	@$(PYTHON) -m venv .venv-verl-$*
	@.venv-verl-$*/bin/python -m pip install --quiet --no-input --disable-pip-version-check '$(TORCH)'
	@.venv-verl-$*/bin/python -m pip install --quiet --no-input --disable-pip-version-check '$(TORCH)' 'verl==$*' $(OLD) -e .
	@touch $@

test-versions: $(VERSIONS:%=.venv-verl-%/.ready) ## run the training loops of older versions of verl (VERSIONS)
	@for version in $(VERSIONS); do \
		echo "==> verl $$version"; \
		OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-verl-$$version/bin/python -m pytest tests/driver $(PYTEST_ARGS) || exit 1; \
	done

# The report is tested in a real browser.
browser:
	@command -v chromium >/dev/null || { \
		[ "$$(id -u)" -eq 0 ] || { \
			echo 'Chromium is missing, and only root can install it: apt-get install chromium fonts-dejavu-core' >&2; \
			exit 1; \
		}; \
		echo '==> installing chromium'; \
		apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
	}

lint: setup ## check style and types: ruff, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy verl_rollout_skip

format: setup ## put the code in order: ruff
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: bench-store bench-trainings ## measure everything, results in benchmarks/results

bench-store: setup ## the store against verl's save_to_disk (BENCH_ARGS=--quick)
	$(PY) -m benchmarks.store $(BENCH_ARGS)

bench-trainings: setup ## whole trainings: off, record, cache, replay, verl's own skip
	$(PY) -m benchmarks.trainings
	$(PY) -m benchmarks.trainings --v1
	$(PY) -m benchmarks.trainings --recording
	$(PY) -m benchmarks.picture

demo: setup ## record a short training on CPU, train again from the dumps, compare (DEMO_ARGS)
	$(PY) -m recipes.demo $(DEMO_ARGS)

tour: setup ## a tour of the store: record, load, kill a writer, damage a file, query with SQL
	$(PY) -m recipes.store_tour

docs: $(DOCS_STAMP) ## build the documentation into docs/_build/html
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

clean: ## remove caches and build products; the virtual environment stays
	rm -rf build dist *.egg-info docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
