# `make demo` and `make test` set up what they need on a bare machine; a second call reuses it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FLOOR := .floor
FLOOR_READY := $(FLOOR)/.ready
ZERO := .deepspeed
ZERO_READY := $(ZERO)/.ready
AXE := .axe
AXE_READY := $(AXE)/.ready

# How the tests are spread over the cores; `make test WORKERS=` runs them one after another.
WORKERS ?= --numprocesses auto --dist worksteal

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-floor docs lint types format soak bench audit mutants clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: $(READY) ## Make .venv with everything that tests and demo need.

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	touch $@

$(FLOOR_READY): constraints-floor.txt $(READY)
	rm -rf $(FLOOR)
	$(BIN)/python -m pip install --quiet --no-deps --target $(FLOOR) --requirement constraints-floor.txt
	touch $@

$(ZERO_READY): constraints-deepspeed.txt $(READY)
	rm -rf $(ZERO)
	$(BIN)/python -m pip install --quiet --no-deps --target $(ZERO) --requirement constraints-deepspeed.txt
	touch $@

$(AXE_READY): tests/browser.sh
	mkdir -p $(AXE)
	sh tests/browser.sh $(AXE)
	touch $@

demo: $(READY) ## Train two real GRPO runs on the CPU: one healthy, one that blows up and is halted.
	$(BIN)/python examples/trl_grpo.py --output-dir demo-output

test: $(READY) $(FLOOR_READY) $(ZERO_READY) $(AXE_READY) ## Run all tests; those of TRL on the newest and on the lowest supported version.
	$(BIN)/python -m pytest $(WORKERS) -m 'not soak'
	KL_GUARD_EXPECT_TRL=1.0.0 PYTHONPATH=$(FLOOR):tests/floor $(BIN)/python -m pytest $(WORKERS) -m 'trl and not soak and not newest' tests/trl

soak: $(READY) ## Run the long repeats as well.
	$(BIN)/python -m pytest -m soak

bench: $(READY) ## Run all benchmarks and write benchmarks/RESULTS.md; SERIES=folder of labelled series, ONLY="cost pins".
	$(BIN)/python benchmarks/results.py $(if $(SERIES),--series $(SERIES)) $(if $(ONLY),--only $(ONLY))

docs: $(READY) ## Build the documentation into site/; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY) ## Check format and lint.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY) ## Check types.
	$(BIN)/mypy

format: $(READY) ## Format, and fix what can be fixed.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

audit: $(READY) ## Do the dependencies fit together, and are any known to be vulnerable?
	$(BIN)/python .ci/audit.py

mutants: $(READY) ## Change the code of stats, detectors and checkpoints in small ways: do the tests notice? Takes hours.
	$(BIN)/python -m pip install --quiet --group mutation
	$(BIN)/python benchmarks/mutants.py

clean: ## Remove what the other targets made.
	rm -rf $(VENV) $(FLOOR) $(ZERO) $(AXE) browser-output demo-output rollback-output .mypy_cache .ruff_cache .pytest_cache .hypothesis site
