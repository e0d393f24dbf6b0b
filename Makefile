# Everything a newcomer needs: `make demo` runs the main job, `make test` every test.
# Both do their own set-up in .venv and target/; a second run builds and downloads nothing.
#
# PYTHON=/path/to/python3.12   the Python to make .venv from (default: the first one >= 3.11)
# ARGS="--json"                more arguments for `demo` and `bench`

.DEFAULT_GOAL := help
.PHONY: help demo test test-rust test-python test-engines lint format bench bench-rust bench-python install wheel clean
.DELETE_ON_ERROR:

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=
# Continuous integration takes Cargo.lock as it is; at a desk cargo may add what Cargo.toml asks for.
LOCKED := $(if $(CI),--locked)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE := 1

TOOLS := $(VENV)/.tools-installed
NATIVE := $(VENV)/.package-installed
SOURCES := $(wildcard Cargo.toml Cargo.lock pyproject.toml README.md LICENSE kernels/*.cu) \
	$(shell find page_copies rust_tree_core python -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.py' \
		-o -name '*.pyi' -o -name py.typed \) -not -path '*/tests/*' -not -path '*/benches/*' 2>/dev/null)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 14

demo: $(NATIVE) ## a real transformer served through the cache, every answer checked
	$(VENV)/bin/unified-cache demo $(ARGS)

test: test-rust test-python ## every test but those inside other engines

test-rust: ## the Rust tests alone
	cargo test --workspace $(LOCKED)

# First those that only need a processor, two at a time; then those that must not be disturbed, one by one. Both
# are run even if the first fail. A plain `pytest` runs all of them one by one.
test-python: $(NATIVE) ## the Python tests alone
	OMP_WAIT_POLICY=passive $(PY) -m pytest -m 'parallel and not engines' --numprocesses=2 --dist=worksteal; first=$$?; \
	$(PY) -m pytest -m 'not parallel and not engines' && exit $$first

test-engines: $(NATIVE) ## the tests inside a real vLLM and a real SGLang: installs 2 GB, once
	$(PY) -m pytest -m engines tests/engines

lint: $(NATIVE) ## formatting, clippy, ruff, types, stubs
	cargo fmt --all --check
	cargo clippy --workspace --all-targets $(LOCKED) -- -D warnings
	cargo clippy --workspace --all-targets --features python $(LOCKED) -- -D warnings
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(PY) -m mypy
	$(PY) -m mypy.stubtest unified_cache._native

format: $(TOOLS) ## put the sources into their standard form
	cargo fmt --all
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

bench: bench-rust bench-python ## every benchmark

bench-rust: ## the criterion benches
	cargo bench --workspace $(LOCKED)

bench-python: $(NATIVE) ## the Python micro-benchmarks
	$(PY) benches/tree.py $(ARGS)
	$(PY) benches/copies.py $(ARGS)

install: $(NATIVE) ## build the wheel in release mode and install it into .venv

wheel: $(TOOLS) ## a wheel to hand on, in dist/
	$(VENV)/bin/maturin build --release $(LOCKED) --interpreter $(PY) --out dist

clean: ## remove what was built, .venv included
	rm -rf $(VENV) build dist target .mypy_cache .ruff_cache .pytest_cache

$(PY):
	scripts/make_venv.sh $(VENV) $(PYTHON)

$(TOOLS): requirements-dev.txt | $(PY)
	$(PY) -m pip install --quiet --requirement requirements-dev.txt
	@touch $@

# The wheel that ships is the one that is tested, so tests see the installed package, not the sources.
$(NATIVE): $(TOOLS) $(SOURCES)
	rm -rf build/wheel
	$(VENV)/bin/maturin build --release $(LOCKED) --interpreter $(PY) --out build/wheel
	$(PY) -m pip install --quiet --force-reinstall --no-deps build/wheel/*.whl
	@touch $@
