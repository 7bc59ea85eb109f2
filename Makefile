# Two commands for a fresh machine: `make run` and `make test`. Everything lives in .venv; nothing needs root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= In the beginning

.PHONY: run test test-long check figures clean

# Runtime only: what `tegrad run` needs on a machine without a GPU.
$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[board,compilers]'
	touch $@

# The same plus test tools, linters and the reference peer.
$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[board,compilers,dev]'
	touch $@

run: $(VENV)/.run
	$(BIN)/tegrad run "$(PROMPT)"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not hardware and not long"

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not hardware"

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

figures: $(VENV)/.dev
	$(BIN)/tegrad bench figures

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
