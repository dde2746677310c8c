# One command a habit. Everything runs in .venv, which `make setup` builds once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Engines that libraries look for and change their ways for, so they live in a folder of their own.
ENGINES := deepspeed hjson py-cpuinfo einops msgpack torchtitan tyro docstring_parser typeguard
TRUTH  ?= ../shared/truth
GPU    ?= h200

.PHONY: help setup lint format test demo bench docs truth clean

help:           ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

setup: $(STAMP) ## build .venv with everything that tests and demo need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Tonnage needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=python3.12, say.") if sys.version_info < (3, 11) else 0'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch (the one large download)"
	@$(PIP) torch
	@echo "installing the libraries that the tests run"
	@$(PIP) --no-deps torchvision
	@$(PIP) transformers peft accelerate timm lightning safetensors pillow
	@echo "installing tonnage"
	@$(PIP) --editable ".[torch,fit,serve,dev]"
	@echo "installing the engines that exported files are loaded with, apart from all else"
	@DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation --upgrade --target $(VENV)/engines $(ENGINES)
	@echo "installing Triton apart, for the tests that interpret its kernels: torch behaves differently beside it"
	@$(PIP) --no-deps --upgrade --target $(VENV)/triton triton || echo "no Triton for this machine: its kernels will not be interpreted"
	@touch $@

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint      ## lint, then every test that needs no GPU, with branch coverage of the core
	$(BIN)/python tools/run_tests.py

demo: $(STAMP)  ## a virtual run of examples/train_gpt.py on a GPU that is not there
	$(BIN)/tonnage run --gpu $(GPU) examples/train_gpt.py

bench: $(STAMP) ## time the pieces that people wait for
	$(BIN)/python benchmarks/run.py

docs: $(STAMP)  ## check that every command and link in README and docs/ is real
	$(BIN)/python -m pytest tests/test_docs.py

truth: $(STAMP) ## hold predictions against real measurements (TRUTH=folder)
	$(BIN)/python $(TRUTH)/check.py --tonnage $(BIN)/tonnage
	$(BIN)/python $(TRUTH)/check.py --tonnage $(BIN)/tonnage --truth $(TRUTH)/h200-expandable.jsonl

clean:          ## remove what was built, keep .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis htmlcov .coverage
