# Two commands do everything: `make train` and `make test`. Both set up first.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# `make test PYTHON=python3.12` uses an environment of its own, .venv-3.12.
ifneq ($(PYTHON),)
VERSION := $(shell python=$$(PYTHON="$(PYTHON)" bash scripts/find_python.sh) && \
	"$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
$(if $(VERSION),,$(error no environment for PYTHON=$(PYTHON)))
endif
export VENV := .venv$(VERSION:%=-%)
BIN := $(VENV)/bin

.PHONY: help setup train test test-parallel test-docker test-engines test-ray prove-cache record-engines check format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## Virtual environment, pinned dependencies, bubblewrap (through apt where root)
	@bash scripts/setup.sh

train: setup ## Train the tiny MoE repair agent with R3 (six to seven minutes on two cores)
	@$(BIN)/agent-rl train configs/repair_tiny.yaml $(ARGS)

test: setup ## Fast and slow tests that need no daemon (under 6 minutes on two cores)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
		-m "not docker and not sglang and not ray and not gpu and not parallel" $(ARGS)

test-parallel: setup ## The trainer under every parallel layout, on up to four processes (gloo)
	@bash scripts/parallel/test.sh $(ARGS)

test-docker: setup ## Contract, red-team and training tests on a private Docker daemon (root)
	@bash scripts/docker/test.sh $(ARGS)

test-engines: setup ## Contract, failure and training tests on real SGLang and vLLM servers (CPU)
	@bash scripts/engines/test.sh $(ENGINES)

prove-cache: setup ## The routing cache's long proofs: benchmark, branch coverage, 10,000 model runs
	@bash scripts/prove_cache.sh

test-ray: setup ## Training over Ray actors, on a Ray that the tests start here
	@$(BIN)/python -c 'import ray' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cluster.lock
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray $(ARGS)

record-engines: setup ## Record the engines' replies anew, from real servers
	@bash scripts/engines/record.sh $(ENGINES)

check: setup ## Format, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports --no-cache

format: setup ## Apply the formatter and the safe lint fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean: ## Remove the virtual environments and caches; runs/ stays
	rm -rf .venv .venv-[0-9]* .pytest_cache .ruff_cache .hypothesis build *.egg-info
