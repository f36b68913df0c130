# Two commands do all: `make quickstart` and `make test`. Both build .venv first when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test check lint bench clean

quickstart: .venv/.installed
	$(BIN)/posttrain quickstart

test: .venv/.installed lint
	$(BIN)/pytest -n 2 -m "not slow"

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/.installed
	$(BIN)/python -m benchmarks.run

# The exact versions of constraints.txt; torch first and by its exact version, so that no other package chooses a build.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench,dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
