# riftco: `make demo` runs the whole pipeline, `make test` checks everything. Both set up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLD_TRITON := $(VENV)/triton-3.6

.PHONY: help demo test lint bench docs soak old-triton install-check clean

help: ## Show what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 8

$(READY): pyproject.toml setup.py $(wildcard kernels/native/*.cpp kernels/native/*.h)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing riftco into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@$(BIN)/python -m kernels.native
	@touch $@

demo: $(READY) ## Raw text to a served model on the built-in micro-world, in minutes
	@$(BIN)/riftco run pipeline

test: $(READY) lint ## Lint, then every test but the soaks, on two cores
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY) ## ruff, mypy and the layering of the packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: $(READY) ## The quick benchmarks (benchmarks/training.py and serving.py take longer), as ratios against peers measured in the same run
	@set -e; for subject in tokenizer storage kernels; do echo "== $$subject"; $(BIN)/python benchmarks/$$subject.py; done

docs: $(READY) ## Check that the documentation's links lead somewhere
	@$(BIN)/python docs/check_links.py

soak: $(READY) ## The slow, full-size evidence, hours of it (of one part: TESTS=tests/artifacts)
	@$(BIN)/python -m pytest -m soak -v --durations=0 --durations-min=1 $(TESTS)

old-triton: $(READY) ## Compile every kernel with the Triton of torch 2.11 too
	@test -d $(OLD_TRITON)/triton || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(OLD_TRITON) 'triton==3.6.*'
	@PYTHONPATH=$(OLD_TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/kernels/test_compiled.py \
		-k 'sm_90 or gfx942'

install-check: ## Install into a new environment and try the command there (minutes)
	@.ci/check-install

clean: ## Remove the environment; runs and the store stay
	rm -rf $(VENV)
