# Everything runs in a virtual environment, made on first use; `make test VENV=/path/to/venv` takes another.
VENV ?= .venv
PYTHON ?= python3.11
PIP = $(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
LAUNCH = $(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m cpkit.launch
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint bench docs clean

demo: $(VENV)/.installed
	$(LAUNCH) verify demo

bench: $(VENV)/.installed
	$(LAUNCH) bench bench-qwen3-moe

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

docs: $(VENV)/.installed-docs
	$(VENV)/bin/mkdocs build --strict

clean: # what builds, checks and docs leave; the virtual environment stays
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by its pin alone, so that nothing else chooses its build
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev $(VENV)/.installed-docs: $(VENV)/.installed-%: $(VENV)/.installed
	$(PIP) -e '.[$*]'
	touch $@
