# Set-up, rehearsal, tests. `make help` lists the targets; their scripts are in tools/.
#
# Each target sets up its dependencies and is quick the second time: the virtual environment is updated only when its pins change,
# and dockerd is started only if no container engine runs (and stopped when the command ends).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

VENV := .venv
VENV_READY := $(VENV)/ready
BIN := $(VENV)/bin
LOCK := $(BIN)/uv pip compile --quiet --generate-hashes --no-header --python-version 3.11 $(if $(UPGRADE),--upgrade)
# The images are built for TPU VMs: x86-64, on Debian 12's C library.
LOCK_IMAGE := $(LOCK) --python-platform x86_64-manylinux_2_36
PYTHON_CODE := launcher training tests tools $(wildcard benchmarks)

.PHONY: help rehearsal test test-nightly test-fast wheel lint docs reference benchmark benchmark-page lock simulate clean need-python need-containers need-kubectl

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-13s %s\n", $$1, $$2 }'

rehearsal: need-containers $(VENV_READY) ## rehearse a whole run on an emulated slice: up, train, down (SET="slice.accelerator_type=v4-32 ...")
	@tools/with-engine.sh $(BIN)/tpu-launch rehearsal -f examples/rehearsal.yaml $(foreach each,$(SET),--set '$(each)')

test: need-containers need-kubectl $(VENV_READY) ## lint, fast tests, tests inside the images, emulated slices (test-nightly: further cases)
	@tools/with-engine.sh $(BIN)/python tools/run_tests.py

test-nightly: need-containers $(VENV_READY) ## trainers killed at random moments, KILLS=100 times; 20,000 simulated runs a side; tests that `make test` leaves out
	@TPU_LAUNCH_KILLS=$(or $(KILLS),100) tools/with-engine.sh $(BIN)/python tools/container_tests.py torch-xla -m nightly
	@tools/with-engine.sh $(BIN)/python tools/container_tests.py virtual-tpu -m nightly
	@tools/with-engine.sh $(BIN)/python tools/container_tests.py torch-tpu -m nightly
	@tools/with-engine.sh $(BIN)/python tools/container_tests.py tensorflow -m nightly
	@tools/with-engine.sh $(BIN)/python tools/container_tests.py oracle-tensorflow -s
	@tools/with-engine.sh $(BIN)/pytest tests/rehearsal -m nightly --timeout=900
	@$(BIN)/pytest -m nightly
	@SIMULATED_RUNS=20000 $(BIN)/pytest -s tests/simulation/test_simulated_runs.py

test-fast: need-kubectl $(VENV_READY) ## run the tests that need no container (ARGS="-k words")
	@$(BIN)/pytest $(ARGS)

simulate: $(VENV_READY) ## simulate runs of launcher and trainer under injected faults: RUNS=N SIDE=launcher|trainer FIRST=S; SEED=S replays one
	@$(BIN)/python -m tests.simulation $(if $(SIDE),--side $(SIDE)) $(if $(FIRST),--first $(FIRST)) \
	    $(if $(SEED),--seed $(SEED) --trace,--runs $(or $(RUNS),10000))

wheel: $(VENV_READY) ## build the wheel and the source distribution, in dist/
	@$(BIN)/python -m build --no-isolation --outdir dist >.tpu-launch/wheel.log || { cat .tpu-launch/wheel.log >&2; exit 1; }
	@ls dist/*

lint: $(VENV_READY) ## ruff, ruff format, mypy (for Linux and macOS), shellcheck, import layers, and the structure of files
	@status=0; mkdir -p -m 700 .tpu-launch; \
	$(BIN)/ruff check --quiet --output-format concise $(PYTHON_CODE) || status=1; \
	$(BIN)/ruff format --check --quiet --output-format concise $(PYTHON_CODE) || { echo "not formatted; run: $(BIN)/ruff format $(PYTHON_CODE)"; status=1; }; \
	$(BIN)/mypy --no-error-summary || status=1; \
	$(BIN)/mypy --no-error-summary --platform darwin --cache-dir .mypy_cache/darwin || status=1; \
	git ls-files -z '*.sh' .ci/run | xargs -0 $(BIN)/shellcheck || status=1; \
	$(BIN)/lint-imports --no-logo > .tpu-launch/lint-imports.log 2>&1 || { cat .tpu-launch/lint-imports.log; status=1; }; \
	$(BIN)/python tools/check_structure.py || status=1; \
	exit $$status

docs: reference ## build the documentation into site/, with a search box; needs no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "open site/index.html"

reference: $(VENV_READY) ## generate docs/reference/ from the code
	@$(BIN)/python -m tools.reference

benchmark: need-containers $(VENV_READY) ## run one benchmark: NAME=x runs benchmarks/x.py (ARGS="--json")
	@test -n "$(NAME)" || { echo "make benchmark NAME=x, where x is one of: $(basename $(notdir $(wildcard benchmarks/*.py)))" >&2; exit 2; }
	@test -f "benchmarks/$(NAME).py" || { echo "there is no benchmarks/$(NAME).py" >&2; exit 2; }
	@tools/with-engine.sh $(BIN)/python tools/benchmark.py "$(NAME)" $(ARGS)

benchmark-page: $(VENV_READY) ## write the results of `make benchmark` into docs/benchmarks.md
	@$(BIN)/python tools/benchmark_page.py

lock: $(VENV_READY) ## resolve all pins again (UPGRADE=1: to the newest allowed)
	$(LOCK) --universal pyproject.toml requirements-dev.in --extra dev --output-file requirements-dev.txt
	$(LOCK_IMAGE) pyproject.toml --output-file images/launcher/requirements.txt
	for each in requirements requirements-2.8 requirements-test requirements-trackers requirements-installer; do \
	    $(LOCK_IMAGE) --override images/torch-xla/overrides.in images/torch-xla/$$each.in --output-file images/torch-xla/$$each.txt; \
	done
	for each in requirements requirements-test requirements-installer; do \
	    $(LOCK_IMAGE) --override images/torch-tpu/overrides.in images/torch-tpu/$$each.in --output-file images/torch-tpu/$$each.txt; \
	done
	for each in requirements requirements-tpu requirements-test requirements-trackers requirements-installer; do \
	    $(LOCK_IMAGE) --override images/tensorflow/overrides.in images/tensorflow/$$each.in --output-file images/tensorflow/$$each.txt; \
	done

clean: export IMAGES := $(IMAGES)
clean: ## remove all containers, networks, volumes, processes and state of tpu-launch, and check it (IMAGES=1: the images too)
	@tools/clean.sh

need-python:
	@tools/need.sh python

need-containers:
	@tools/need.sh python containers gcloud

need-kubectl:
	@tools/need.sh kubectl

$(VENV_READY): requirements-dev.txt pyproject.toml tools/venv.sh | need-python
	@tools/venv.sh $(VENV) && touch $@
