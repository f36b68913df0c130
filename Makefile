# Two commands do all: `make quickstart` and `make test`. Both build .venv first when it is missing or out of date: the
# quickstart with the packages that posttrain itself needs, the others with those of the tests and benchmarks too.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test slow faults test-vllm check lint bench learn clean

quickstart: .venv/.installed
	$(BIN)/posttrain quickstart

test: .venv/.installed-dev lint
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# Every slow proof of the suite.
slow: .venv/.installed-dev build/trl-1.12
	$(BIN)/pytest -n 2 -m slow --ignore tests/test_memory.py
	$(BIN)/pytest -m slow tests/test_memory.py  # alone: beside other work peaks vary by a fifth

# Kills, damage, full disks, numbers that are not finite, signals: all of the proofs, the slow ones too (docs/resume.md).
faults: .venv/.installed-dev
	$(BIN)/pytest -n 2 tests/test_faults.py tests/test_verify.py tests/test_resume.py tests/test_store_checkpoint.py

# The engines' conformance suite on vLLM itself, its server too.
test-vllm: build/vllm/.installed
	build/vllm/bin/python -m pytest tests/test_engines.py tests/test_vllm.py

# vLLM for CPUs wants other versions than ours: an environment of its own, with every package pinned.
build/vllm/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/pip install --quiet --upgrade pip
	build/vllm/bin/pip install --quiet --no-deps -r constraints-vllm.txt
	build/vllm/bin/pip install --quiet --no-deps -e .
	touch $@

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/.installed-dev build/trl-1.12 build/vllm/.installed
	$(BIN)/python -m benchmarks.save
	$(BIN)/python -m benchmarks.neighbour
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.online
	$(BIN)/python -m benchmarks.generate

# The last TRL that had PPO, to compare with in `make slow` and `make bench`, apart from the environment's own.
build/trl-1.12: .venv/.installed-dev
	$(BIN)/pip install --quiet --no-deps --target $@ trl==1.12.0

learn: .venv/.installed-dev
	$(BIN)/python -m benchmarks.learn
	$(BIN)/python -m benchmarks.learn_online

# The exact versions of constraints.txt; torch first and by its exact version, so that no other package chooses a build.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench,dev,gpu-dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
