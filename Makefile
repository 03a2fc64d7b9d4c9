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
# The tests of a file share their recordings. In folder order the long files come first.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# One stamp for each group of packages. Its name holds a checksum of what is installed: another setup.cfg is another stamp.
INSTALL := PYTHON='$(PYTHON)' scripts/pip_install.sh
CHECKSUM := $(shell (cat setup.cfg; echo '$(TORCH)') | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(CHECKSUM)
DEV_READY := $(READY)-dev
DOCS_READY := $(READY)-docs

.DEFAULT_GOAL := help
.PHONY: help setup browser test test-all test-rest test-versions lint format bench bench-store bench-trainings demo tour docs clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | \
		awk -F'\t' '{ printf "  %-18s %s\n", $$1, $$2 }'

setup: $(DEV_READY) ## create the environment (VENV, PYTHON) for the demo, the tests and the linters

# torch first and alone: verl would bring a CUDA build and gigabytes of nvidia packages with it.
# An environment without a stamp (an interrupted set-up) is completed, not made again.
$(READY):
	@$(INSTALL) $(VENV) '$(TORCH), into $(VENV)' '$(TORCH)'
	@$(INSTALL) $(VENV) 'verl-rollout-skip, verl and Ray' '$(TORCH)' -e '.[verl]'
	@if $(PY) -m pip freeze 2>/dev/null | grep -q '^torch==.*+cpu' && $(PY) -m pip freeze 2>/dev/null | grep '^nvidia-'; then \
		echo 'CUDA packages (above) came beside a CPU build of torch: remove $(VENV) and set up again' >&2; \
		exit 1; \
	fi
	@rm -f $(VENV)/.ready-*
	@touch $@

$(DEV_READY): $(READY)
	@$(INSTALL) $(VENV) 'tools for tests and linters' '$(TORCH)' -e '.[verl,dev]'
	@touch $@
	@echo '==> $(VENV) is ready for make demo, make test and make lint'

$(DOCS_READY): $(READY)
	@$(INSTALL) $(VENV) 'tools for the documentation' '$(TORCH)' -e '.[verl,docs]'
	@touch $@

test: setup ## run the quick tests before every commit (TESTS=tests/unit PYTEST_ARGS='-k name -x')
	$(PYTEST) -m 'not slow' $(TESTS) $(PYTEST_ARGS)

test-all: setup browser ## run every test at full depth: all trainings, fault storms, fuzzing, browser, documents
	$(PYTEST) --hypothesis-profile=full $(TESTS) $(PYTEST_ARGS)

test-rest: setup browser ## run what test-all adds to test
	$(PYTEST) -m 'slow or hypothesis' --hypothesis-profile=full $(TESTS) $(PYTEST_ARGS)

# Other versions of verl have an environment each; VERL_SOURCE=/path tests a checkout of it instead.
VERL_SOURCE ?=
VERSIONS ?= $(if $(VERL_SOURCE),source,0.9.0 0.8.0 0.7.1 0.6.1)
BEFORE_0_9 := 0.8.% 0.7.% 0.6.%
# numpy 2, pyarrow 22 and transformers 5 came after verl 0.8; TransferQueue and V1 trainers came with verl 0.9.
OLD := 'numpy<2' 'pyarrow<22' 'transformers<5'
NEW := TransferQueue pyzmq msgspec
TOOLS := cachetools fastapi openai uvicorn hypothesis pytest pytest-mock pytest-timeout psutil
V1_TESTS := $(wildcard tests/unit/test_v1_*.py tests/integration/test_v1_*.py)

.PRECIOUS: .venv-verl-%/.ready
.venv-verl-%/.ready: setup.cfg
	@$(INSTALL) .venv-verl-$* '$(TORCH), into .venv-verl-$*' '$(TORCH)'
	@$(INSTALL) .venv-verl-$* 'verl $*' '$(TORCH)' 'verl==$*' $(if $(filter $(BEFORE_0_9),$*),$(OLD),$(NEW)) $(TOOLS) -e .
	@touch $@

# A checkout changes, so it is installed each time.
.PHONY: .venv-verl-source/.ready
.venv-verl-source/.ready:
	@test -f '$(VERL_SOURCE)/setup.py' || { echo 'VERL_SOURCE=$(VERL_SOURCE) is not a checkout of verl' >&2; exit 1; }
	@$(INSTALL) .venv-verl-source '$(TORCH), into .venv-verl-source' '$(TORCH)'
	@$(INSTALL) .venv-verl-source 'verl of $(VERL_SOURCE)' '$(TORCH)' '$(VERL_SOURCE)' $(NEW) $(TOOLS) -e .
	@$(INSTALL) .venv-verl-source 'its newest files' --force-reinstall --no-deps '$(VERL_SOURCE)'

test-versions: $(VERSIONS:%=test-verl-%) ## run the training loops of other versions of verl (VERSIONS, or VERL_SOURCE=/path)

test-verl-%: .venv-verl-%/.ready
	@echo '==> verl $*'
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-verl-$*/bin/python -m pytest tests/driver \
		$(if $(filter $(BEFORE_0_9),$*),,$(V1_TESTS)) $(PYTEST_ARGS)

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

demo: $(READY) ## record short trainings on CPU, replay them, compare (DEMO_ARGS)
	$(PY) -m recipes.demo $(DEMO_ARGS)

tour: setup ## a tour of the store: record, load, kill a writer, damage a file, query with SQL
	$(PY) -m recipes.store_tour

docs: $(DOCS_READY) ## build the documentation into docs/_build/html
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

clean: ## remove caches and build products; the virtual environment stays
	rm -rf build dist *.egg-info docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
