# `make demo` and `make test` do everything on a fresh machine with Python 3.11.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-slow lint format clean

demo: $(INSTALLED)
	$(BIN)/python -m experiments.kernel_speed

test: lint
	$(BIN)/python -m pytest -m "not slow"

# Checks that take minutes each: memory at full length, long ugly inputs in every gate.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
