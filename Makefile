# Two commands for a fresh machine: `make run` and `make test`. Everything lives in .venv; nothing needs root.
# python3 if it is new enough, else the newest beside it that is (uv puts its own into ~/.local/bin); PYTHON=... chooses.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell PATH="$$PATH:$$HOME/.local/bin"; for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && command -v "$$p" && exit; done; echo python3)
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= In the beginning

.PHONY: run test test-long check figures clean

# Runtime only: what `tegrad run` needs on a machine without a GPU.
$(VENV)/.run: pyproject.toml
	@$(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null || \
		{ python="$(PYTHON)"; "$$python" tegrad/_python.py && "$$python" -m venv --clear $(VENV); }
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
