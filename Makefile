# One command a habit. Everything runs in .venv, which `make setup` builds once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# The second environment has a CUDA build of torch, alone: NVIDIA's packages, which torch asks for, are not needed.
VENV_CUDA  := .venv-cuda
STAMP_CUDA := $(VENV_CUDA)/.setup-done
PIP_CUDA   := $(VENV_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check
CUDA_TORCH := torch==2.11.0 torchvision==0.26.0
# Further ones hold other versions of torch, whose own host code then runs: `make setup-torch VERSION=2.6.0`.
VERSION    ?= 2.6.0
VENV_TORCH ?= .venv-torch-$(VERSION)
NEED_TORCH := peft accelerate timm lightning pytorch-lightning torchmetrics bitsandbytes torchao liger-kernel diffusers trl datasets
NEEDED     := filelock "typing_extensions>=4.10" "setuptools<82" "sympy>=1.13.3" networkx jinja2 fsspec pyyaml psutil \
              packaging lightning-utilities pillow ninja scipy fastapi uvicorn pydantic safetensors transformers \
              pyarrow pandas dill multiprocess xxhash importlib_metadata requests
# Engines that libraries look for and change their ways for, so they live in a folder of their own.
ENGINES := deepspeed hjson py-cpuinfo einops msgpack torchtitan tyro docstring_parser typeguard
TRUTH  ?= ../shared/truth
GPU    ?= h200

.PHONY: help setup setup-cuda setup-torch torchvision-apart packages site lint format test slow demo bench docs truth league league-page league-sample clean

help:           ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 15

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
	@$(PIP) --editable ".[torch,fit,serve,mcp,dev,publish]"
	@echo "installing the engines that exported files are loaded with, apart from all else"
	@DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation --upgrade --target $(VENV)/engines $(ENGINES)
	@echo "installing Triton apart, for the tests that interpret its kernels: torch behaves differently beside it"
	@$(PIP) --no-deps --upgrade --target $(VENV)/triton triton || echo "no Triton for this machine: its kernels will not be interpreted"
	@echo "installing the transformers that some published runs had, apart"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/transformers-5.12 transformers==5.12.0 tokenizers==0.22.2
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || $(MAKE) --no-print-directory torchvision-apart
	@touch $@

# An index may have torch for the CPU and torchvision for CUDA alone. That one cannot be imported, and transformers, which imports
# it where it is installed, then fails too: Trainer and tonnage.fit_trainer with it. timm alone needs it: see tests/torchvision_names.py.
torchvision-apart:
	@echo "moving torchvision apart: the index has none that matches this torch"
	@$(PIP) --no-deps --upgrade --target $(VENV)/torchvision torchvision
	@$(BIN)/python -m pip uninstall --quiet --yes --disable-pip-version-check torchvision

setup-cuda: $(STAMP_CUDA) ## build .venv-cuda: a CUDA build of torch without NVIDIA's packages

# torch and what requires it come last and without their requirements: pip would follow torch's to gigabytes of CUDA libraries.
$(STAMP_CUDA): pyproject.toml constraints.txt
	@test -x $(VENV_CUDA)/bin/python || { echo "making $(VENV_CUDA)"; $(PYTHON) -m venv $(VENV_CUDA); }
	@echo "installing tonnage and the libraries that the tests run"
	@$(PIP_CUDA) --constraint constraints.txt --editable ".[dev]" $(NEEDED)
	@echo "installing torch built for CUDA (the one large download)"
	@$(PIP_CUDA) --no-deps $(CUDA_TORCH)
	@grep -qE "^cuda.* = '" $(VENV_CUDA)/lib/python*/site-packages/torch/version.py || { echo "The index gave a CPU build of torch. Set PIP_INDEX_URL to one that has the CUDA build."; exit 1; }
	@$(PIP_CUDA) --no-deps "$$($(VENV_CUDA)/bin/python -c 'from importlib.metadata import requires; print(next(r.partition(";")[0] for r in requires("torch") if r.startswith("triton")))')"
	@$(PIP_CUDA) --constraint constraints.txt --no-deps $(NEED_TORCH)
	@touch $@

# torchvision's versions follow torch's: 0.21.0 is made for 2.6.0.
setup-torch:    ## build .venv-torch-VERSION: the same with another torch (VERSION=2.6.0)
	@$(MAKE) --no-print-directory setup-cuda VENV_CUDA=$(VENV_TORCH) \
	  CUDA_TORCH="torch==$(VERSION) torchvision==$(shell echo $(VERSION) | awk -F. '{print "0." $$2 + 15 "." $$3}')"

lint: $(STAMP)  ## ruff and mypy, and the workflows and the action of GitHub
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-actions action.yml
	$(BIN)/zizmor --quiet --offline .github action.yml

format: $(STAMP) ## put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# CUDA builds of torch are for Linux; elsewhere the tests that need one are skipped.
test: $(STAMP) $(if $(filter Linux,$(shell uname -s)),$(STAMP_CUDA)) ## lint, and every test that needs no GPU, under both builds of torch
	$(BIN)/python tools/run_tests.py

demo: $(STAMP)  ## a virtual run of examples/train_gpt.py on a GPU that is not there
	$(BIN)/tonnage run --gpu $(GPU) examples/train_gpt.py

bench: $(STAMP) ## time the pieces that people wait for
	$(BIN)/python benchmarks/run.py

docs: $(STAMP)  ## make the outputs in README and docs/ anew, and check that their commands and links are real
	$(BIN)/python tools/docs.py
	$(BIN)/python -m pytest tests/test_docs.py

slow: $(STAMP) $(if $(filter Linux,$(shell uname -s)),$(STAMP_CUDA)) ## the tests marked slow, which repeat what quicker ones show
	$(BIN)/python tools/run_tests.py --slow

truth: slow $(STAMP_CUDA) ## hold predictions of both builds against real measurements (TRUTH=folder)
	$(BIN)/python $(TRUTH)/check.py --tonnage $(VENV_CUDA)/bin/tonnage
	$(BIN)/python $(TRUTH)/check.py --tonnage $(VENV_CUDA)/bin/tonnage --truth $(TRUTH)/h200-expandable.jsonl
	$(BIN)/python $(TRUTH)/check.py --tonnage $(VENV_CUDA)/bin/tonnage --scripts $(CURDIR)/benchmarks/truth/scripts --truth $(CURDIR)/benchmarks/truth/h200-compiled.jsonl
	$(BIN)/python $(TRUTH)/check.py --tonnage $(VENV_CUDA)/bin/tonnage --scripts $(CURDIR)/benchmarks/truth/scripts --truth $(CURDIR)/benchmarks/truth/h200-libraries.jsonl
	PYTHONPATH=$(CURDIR)/$(VENV)/engines $(BIN)/python $(TRUTH)/check.py --tonnage $(VENV_CUDA)/bin/tonnage --scripts $(CURDIR)/benchmarks/truth/scripts --truth $(CURDIR)/benchmarks/truth/h200-deepspeed.jsonl
	$(BIN)/python $(TRUTH)/check.py --tonnage $(VENV_CUDA)/bin/tonnage --scripts $(CURDIR)/benchmarks/truth/unseen --truth $(CURDIR)/benchmarks/truth/h200-unseen.jsonl
	PYTHONPATH=$(CURDIR)/$(VENV)/torchvision $(BIN)/python $(TRUTH)/check.py --tonnage $(BIN)/tonnage
	PYTHONPATH=$(CURDIR)/$(VENV)/torchvision $(BIN)/python $(TRUTH)/check.py --tonnage $(BIN)/tonnage --truth $(TRUTH)/h200-expandable.jsonl

league: $(STAMP) $(if $(filter Linux,$(shell uname -s)),$(STAMP_CUDA)) ## predict every run that others published, on the CPU alone; goes on where it was stopped
	$(BIN)/python benchmarks/league/league.py --resume
	$(BIN)/python benchmarks/league/page.py

league-page: $(STAMP) ## docs/accuracy.md and build/accuracy.html, from what the league has kept
	$(BIN)/python benchmarks/league/page.py

league-sample: $(STAMP) ## a few rows of each source, held against what was kept
	$(BIN)/python benchmarks/league/league.py --check --sample 3

packages: $(STAMP) ## build what is published into dist/: wheels for Linux (x86-64, aarch64), a pure one, the sdist; and check them
	@rm -rf dist
	@for target in x86_64-linux-gnu aarch64-linux-gnu any; do \
	  TONNAGE_TARGET=$$target $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist . || exit 1; \
	done
	@$(BIN)/python -m hatchling build --target sdist --directory dist
	@$(BIN)/python -m twine check --strict dist/*
	@ls -s --block-size=K dist

site: $(STAMP)  ## build the pages of README and docs/ as a site, into build/site
	$(BIN)/mkdocs build --strict --quiet

clean:          ## remove what was built, keep .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis htmlcov .coverage
