# `make` lists the targets. Nothing is needed before any of them but Python 3.10 or newer.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
JOBS   ?= 2

# DeepSpeed of the tests: nothing is compiled for a GPU.
export DS_BUILD_OPS ?= 0
export DS_ACCELERATOR ?= cpu
# What the processes of the tests import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-stock test-hpc test-gpu test-torch fuzz faults architectures watch-storm image locks lint type docs dist bench bench-large clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing what the demo needs into $(VENV) (once) ..."
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[transformers]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "installing what the tests need into $(VENV) (once) ..."
	$(PIP) --editable '.[test]'
	@touch $@

setup: $(VENV)/.test  ## make the virtual environment with everything that development needs

demo: $(VENV)/.demo  ## on tiny real models: HF -> Megatron TP2xPP2 -> TP4 -> HF; dialogues -> training -> Hub -> answer
	$(BIN)/python -m tests.demo
	$(BIN)/python -m tests.demo_train

test: $(VENV)/.test  ## the tests that start no other framework (13 minutes on 2 cores)
	$(BIN)/python -m pytest --quiet --numprocesses $(JOBS) --dist worksteal \
		-m "not slow and not megatron and not distributed and not hpc and not stock"

test-all: $(VENV)/.test  ## real megatron-core, torch.distributed and DeepSpeed too, and what is slow (45 minutes on 2 cores)
	$(BIN)/python -m pytest --quiet --numprocesses $(JOBS) --dist worksteal -m "not hpc and not stock"

MEGATRON ?= 0.19.2
STOCK := build/megatron-$(MEGATRON)
# The first of these that is Python 3.12 or newer, which megatron-core wants from 0.17 on.
NEWER ?= $(shell for python in $(PYTHON) python3.12 python3.13 $(HOME)/.pyenv/versions/3.1[23]*/bin/python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && break; done)

$(STOCK)/.made: constraints.txt
	@test -n "$(NEWER)" || { echo "megatron-core $(MEGATRON) needs Python 3.12 or newer: make test-stock NEWER=PATH"; exit 1; }
	@echo "installing megatron-core $(MEGATRON), megatron.training and its Muon included, into $(STOCK) (once) ..."
	$(NEWER) -m venv $(STOCK)
	grep -v '^megatron-core==' constraints.txt > $(STOCK)/constraints.txt
	$(STOCK)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(STOCK)/constraints.txt \
		torch==2.13.0 megatron-core==$(MEGATRON) emerging-optimizers einops numpy pyyaml
	@touch $@

test-stock: $(VENV)/.test $(STOCK)/.made  ## stock Megatron-LM, fed with our flags and checkpoints alone (needs Python 3.12)
	VITRUVIAN_STOCK=$(abspath $(STOCK)/bin/python) $(BIN)/python -m pytest --quiet --numprocesses $(JOBS) -m stock

test-hpc: $(VENV)/.test  ## jobs on a real Slurm, an image by a real Apptainer, on this machine (root; apt-get install slurm-wlm munge)
	$(BIN)/python -m pytest --verbose -rs tests/hpc

test-gpu: $(VENV)/.test  ## on a machine with a GPU: attention, trainings, speed beside TRL and torchtitan
	$(PIP) --editable '.[liger]'
	$(PIP) tyro tensorboard
	$(PIP) --no-deps trl==1.16.0 torchtitan==0.2.2 torchdata==0.11.0
	env -u DS_ACCELERATOR $(BIN)/python -m pytest --verbose -rs -m gpu tests/gpu
	$(BIN)/python -m tests.bench.gpu

TORCH ?= 2.10.0
OTHER := build/torch-$(TORCH)

$(OTHER)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OTHER)/constraints.txt \
		torch==$(TORCH) --editable '.[test]'
	@touch $@

test-torch: $(OTHER)/.made  ## what trains, saves and reads checkpoints, with the oldest torch (TORCH=2.10.0)
	$(OTHER)/bin/python -m pytest --quiet --numprocesses $(JOBS) --dist worksteal tests/train tests/golden/test_fsdp.py \
		tests/roundtrip/test_fsdp_roundtrip.py tests/unit/test_fsdp2hf.py

MINUTES ?= 20

fuzz: $(VENV)/.test  ## random cases, judged by other programs: MINUTES=20; what is found is printed with its seed
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --jobs $(JOBS)

FAULTS ?= 1000

faults: $(VENV)/.test  ## conversions between S3 and the Hub on loopback, with faults and kills at random: FAULTS=1000 (10 minutes)
	$(BIN)/python -m tests.remote.faults --faults $(FAULTS)

architectures: $(VENV)/.test  ## every architecture of transformers through FSDP and back, as listed in tests/architectures (20 minutes)
	$(BIN)/python -m tests.architectures.sweep

watch-storm: $(VENV)/.test  ## `convert watch` beside a training that deletes and renames, killed at random: 200 checkpoints (10 minutes)
	$(BIN)/python -m tests.faults.watch_storm

image:  ## an image for Apptainer or Singularity: VARIANT=cpu, cpu-arm64, cuda, rocm or rocm-laif (containers/IMAGES.md)
	containers/build.sh $(VARIANT) $(BUILD)

locks:  ## resolve the packages of the images anew, with their hashes (needs uv)
	containers/locks/lock.sh

lint: $(VENV)/.test  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.test  ## mypy --strict
	$(BIN)/mypy
	$(BIN)/mypy tests/library/typed_use.py

DOCS := build/docs

$(DOCS)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(DOCS)/.made  ## the pages, in build/site: strict, every link followed (their commands are run by `make test`)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

TOOLS := build/tools

$(TOOLS)/.made: constraints.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build twine
	@touch $@

dist: $(TOOLS)/.made  ## wheel and sdist in dist/, checked, and installed alone on each Python that is here
	$(TOOLS)/bin/python tests/dist.py

bench: $(VENV)/.test  ## compare with cp, with other converters, tokenizers and packers, as ratios
	$(BIN)/python -m tests.bench.bench
	$(BIN)/python -m tests.bench.data
	$(BIN)/python -m tests.bench.library
	$(BIN)/python -m tests.bench.remote

bench-large: $(VENV)/.test  ## plans of Llama 3.1 405B and DeepSeek-V3, on checkpoints of holes
	$(BIN)/python -m tests.bench.large

clean:  ## remove the virtual environment and everything that was made
	rm -rf $(VENV) build dist demo *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
