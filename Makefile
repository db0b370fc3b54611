# make setup | serve | test | test-long | lint | format | bench-cpu | wheel | clean
# Variables: PYTHON (3.11 or newer), VENV (an environment of your own), ARGS (handed to serve, pytest and bench-cpu).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# --no-compile: bytecode is made when a module is first imported, and most modules never are.
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
RUN_STAMP := $(VENV)/.ridgeline-run
NATIVE_STAMP := $(VENV)/.ridgeline-native
DEV_STAMP := $(VENV)/.ridgeline-dev
LONG_STAMP := $(VENV)/.ridgeline-long
WHEEL_STAMP := $(VENV)/.ridgeline-wheel
TORCH := torch==2.13.0
TRITON := triton==3.6.0
NEWEST_TRITON := 3.9.0
NEWEST := $(abspath $(VENV))/triton-$(NEWEST_TRITON)
NEWEST_STAMP := $(NEWEST)/.ridgeline-installed
# Tests and servers start many processes, which would compile their modules each time where the user's shell says so.
export PYTHONDONTWRITEBYTECODE :=
# The compiler beside pip and mypy.
MAKEFLAGS += --jobs=2
TOO_OLD := "Ridgeline needs Python 3.11 or newer: make PYTHON=python3.11"

.PHONY: setup serve test test-long lint format bench-cpu wheel clean
.DEFAULT_GOAL := setup

setup: $(DEV_STAMP) $(NATIVE_STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and $(TOO_OLD))'
	$(PYTHON) -m venv $(VENV)

# Without a GPU and without a torch of the user's, a CPU build is asked for by name, since plain resolution brings
# gigabytes of CUDA. --no-deps: what torch needs comes from the usual index in the next line.
$(RUN_STAMP): pyproject.toml Makefile | $(BIN)/python
	@$(BIN)/python tools/installed.py torch 2.11 || command -v nvidia-smi >/dev/null || ( set -x; \
		$(PIP_INSTALL) --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu $(TORCH) )
	$(PIP_INSTALL) -e '.[structured]'
	@touch $@

# Needs a C++ compiler; without one everything works, slower.
$(NATIVE_STAMP): $(RUN_STAMP) $(wildcard src/ridgeline/ops/native/*)
	@$(BIN)/python -m ridgeline.ops.native.build || true
	@touch $@

# A torch for CUDA brings its own triton; beside a CPU build the interpreter runs on the one named here.
$(DEV_STAMP): $(RUN_STAMP)
	@$(BIN)/python tools/installed.py triton 3.6 || ( set -x; $(PIP_INSTALL) $(TRITON) )
	$(PIP_INSTALL) -e '.[structured,dev]'
	@touch $@

$(LONG_STAMP): $(DEV_STAMP)
	$(PIP_INSTALL) -e '.[structured,dev,long]'
	@touch $@

$(WHEEL_STAMP): $(RUN_STAMP)
	$(PIP_INSTALL) -e '.[structured,wheel]'
	@touch $@

# The newest Triton, which a user's torch may bring, lies beside the environment and comes first where a test run asks for it.
$(NEWEST_STAMP): | $(DEV_STAMP)
	$(PIP_INSTALL) --no-deps --upgrade --target $(NEWEST) triton==$(NEWEST_TRITON)
	@touch $@

serve: $(NATIVE_STAMP)
	$(BIN)/ridgeline serve $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tools/budgets.py
	$(BIN)/python tools/words.py

format: $(DEV_STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Kernels in the interpreter of the newest Triton: one file in `make test`, all files in `make test-long`.
WITH_NEWEST = OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 PYTHONPATH=$(NEWEST) $(BIN)/python
test_newest = $(WITH_NEWEST) tools/installed.py triton $(NEWEST_TRITON) && \
	$(WITH_NEWEST) -m pytest -n 2 --dist worksteal -m 'not gpu and not long'

test: lint $(NATIVE_STAMP) $(NEWEST_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not gpu and not long' $(ARGS)
	$(test_newest) tests/ops/test_triton.py -k 'not several_rows_that_ask and not tree and not compacted and not many'

# Tests in a browser (apt-get install chromium, else they are skipped) and tests that take minutes.
test-long: $(LONG_STAMP) $(NATIVE_STAMP) $(NEWEST_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long $(ARGS)
	$(test_newest) $$(grep -li triton tests/ops/test_*.py) tests/quant/test_kernels.py

bench-cpu: $(DEV_STAMP) $(NATIVE_STAMP)
	$(BIN)/python benchmarks/cpu.py $(ARGS)

# dist/: a source distribution, and from it a wheel with compiled CPU operations (minutes, once per change of their sources: docs/packaging.md).
# auditwheel refuses symbols that are newer than the tag. libgomp is torch's.
wheel: $(WHEEL_STAMP)
	rm -rf dist build/dist
	CPU_LIBRARIES=$(abspath build/libraries) $(BIN)/python -m build --outdir build/dist
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --plat manylinux_2_28_x86_64 --only-plat --exclude libgomp.so.1 \
		--wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist/

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
