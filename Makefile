PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup run test check protos

setup: $(VENV)/.ready  ## Create .venv with everything in it

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

run: setup  ## Generate from a HumanEval prompt over gRPC through the three stages, under Ray
	$(BIN)/stagespec fetch
	$(BIN)/stagespec generate --humaneval 0 --max-tokens 64

test: setup check  ## Lint, type-check and run the default test suite
	$(BIN)/stagespec fetch
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code

protos: setup  ## Generate the Python code beside the protos
	$(BIN)/python -m deploy.protos
