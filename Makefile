# For a fresh machine: `make run` and `make test`; on a Jetson first `make selftest`. Everything lives in .venv; nothing
# needs root.
# python3 if it is new enough, else the newest beside it that is (uv puts its own into ~/.local/bin); PYTHON=... chooses.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell PATH="$$PATH:$$HOME/.local/bin"; for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && command -v "$$p" && exit; done; echo python3)
VENV := .venv
BIN := $(VENV)/bin
# Processes that share the tests, a file at a time, those that take longest first (tests/balance.py).
WORKERS ?= 2
# Tests start hundreds of processes, each of which would compile the package's sources anew.
export PYTHONDONTWRITEBYTECODE :=
# Threads of numpy's that wait for work burn the cores that other processes want.
export OPENBLAS_NUM_THREADS ?= 1
# A worker that crashes ends the run: xdist would hand out the test that crashed it again and again.
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# More for pytest: `make test MORE=--record-seconds`.
MORE ?=
PROMPT ?= In the beginning
AARCH64 ?= .aarch64

.PHONY: docs run selftest test test-fast test-long test-policies test-aarch64 check collected figures clean

# What users need: every command but `bench`, with a GPU or without.
$(VENV)/.run: pyproject.toml
	@$(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null || \
		{ python="$(PYTHON)"; "$$python" tegrad/_python.py && "$$python" -m venv --clear $(VENV); }
	@echo "Installing what tegrad needs into $(VENV): once, some minutes, without a word"
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[board,compilers,chat,hub,serve]'
	touch $@

# The same plus test tools, linters and the reference peer.
$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[board,compilers,dev]'
	touch $@

# The long tests' too: Ray.
$(VENV)/.long: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[board,compilers,dev,replicas]'
	touch $@

run: $(VENV)/.run
	$(BIN)/tegrad run "$(PROMPT)"

selftest: $(VENV)/.run
	$(BIN)/tegrad selftest

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q $(SHARED) $(MORE) -m "not hardware and not long"

# An answer within three minutes: without the files of tests that take long (tests/seconds.json).
test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -q $(SHARED) --fast -m "not hardware and not long"

test-long: $(VENV)/.long
	$(BIN)/python -m pytest -q $(SHARED) -m "not hardware"

# The suite under the second memory policy, with stores through and back (results/memory-policies.json).
test-policies: $(VENV)/.dev
	$(BIN)/python tools/policies.py

# The suite in a Debian arm64 root under qemu-user (docs/testing.md); needs root, goes on where it was stopped.
test-aarch64:
	$(PYTHON) tools/aarch64/run.py $(AARCH64)

# What pytest makes of the tests' sources is kept, so that processes which share them need not each make it. What is wrong
# with them is told by the tests.
collected: $(VENV)/.dev
	-@$(BIN)/python -m pytest -q --collect-only >/dev/null

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documents as a site in build/docs; a warning is an error.
docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

figures: $(VENV)/.dev
	$(BIN)/tegrad bench figures

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
