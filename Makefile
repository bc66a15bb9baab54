# `make demo` and `make test` do everything on a fresh machine with Python 3.11.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := .venv/.installed
# A second environment with the GPU and TPU compilers: with them installed, jax looks for devices.
AOT_INSTALLED := .venv-aot/.installed
STORAGE_INSTALLED := .venv-storage/.installed

.PHONY: corpus demo test test-kernels test-slow test-storage lint format clean

demo: $(INSTALLED)
	$(BIN)/python -m experiments.demo

# Public-domain text from Debian packages, for the small language-model results.
corpus: $(INSTALLED)
	$(BIN)/python -m experiments.fetch_corpus

test: lint
	$(BIN)/python -m pytest -m "not slow and not aot"

# Kernels and train steps, AOT compiled by the real TPU and GPU compilers without a device.
test-kernels: $(AOT_INSTALLED)
	JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -m aot

# The full grid of lengths, chunks, gates and segments, with XLA's default optimizations.
test-slow: $(INSTALLED)
	XLA_FLAGS= $(BIN)/python -m pytest -m "slow and not aot"

# Object storage against local S3 and GCS servers, which have an environment of their own.
test-storage: $(INSTALLED) $(STORAGE_INSTALLED)
	STORAGE_PYTHON=$(CURDIR)/.venv-storage/bin/python $(BIN)/python -m pytest -n 0 tests/train/test_object_storage.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -e ".[train,plots,data,eval,dev]"
	touch $@

$(AOT_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python $(INSTALL) -e ".[train,plots,data,eval,dev,aot]"
	touch $@

$(STORAGE_INSTALLED):
	$(PYTHON) -m venv .venv-storage
	.venv-storage/bin/python -m pip install --quiet "moto[server]==5.2.5" "gcp-storage-emulator==2026.7.19"
	touch $@

clean:
	rm -rf .venv .venv-aot .venv-storage .pytest_cache .ruff_cache *.egg-info
