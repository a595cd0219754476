# `make demo` and `make test` need only Python 3.11 or newer: both make .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo contact-sheet test test-gpu lint types bench train-tiny eval-tiny clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vgbatch needs Python 3.11 or newer, not " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/vgbatch run manifests/examples/demo.parquet --out out/demo || test $$? -eq 3
	$(BIN)/vgbatch report --out out/demo --gpu-price 2.5

# The README's picture, of clips by the model and the engine as they are now: half a minute on 2 CPU cores.
contact-sheet: .venv/ready
	$(BIN)/vgbatch run manifests/examples/demo.parquet --out out/demo --refresh model --refresh numerics || test $$? -eq 3
	$(BIN)/python docs/contact_sheet.py out/demo docs/demo.png

test: .venv/ready lint types
	$(BIN)/pytest

# On a machine with a card: ops in every precision that they take, and what only a card can show.
test-gpu: .venv/ready
	$(BIN)/pytest tests/test_pipeline_*.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/ready
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python bench/plan_million.py

# Needs a GPU: about 24 minutes on one H200.
train-tiny: .venv/ready
	$(BIN)/python -m pipeline.models.tiny.train all --state out/tiny --folder pipeline/models/tiny

# The model card's table, with progress on stderr. Without a GPU about 15 minutes on 2 CPU cores.
eval-tiny: .venv/ready
	$(BIN)/python -m pipeline.models.tiny.train evaluate --state out/tiny --folder pipeline/models/tiny

clean:
	rm -rf .venv build *.egg-info
