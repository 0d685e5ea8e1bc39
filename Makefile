# Every target makes the virtual environment it needs first. PYTHON chooses the interpreter: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
# One more than there are processors: many tests wait, for processes that they start or for a time to run out.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: demo demo-vision test test-slow lint bench clean

demo: .venv/with-demo
	$(BIN)/laplacian-heads demo

demo-vision: .venv/with-demo-vision
	$(BIN)/laplacian-heads demo-vision

test: .venv/with-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

test-slow: .venv/with-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m slow

lint: .venv/with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: .venv/with-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist *.egg-info

# One stamp for each set of optional dependencies of pyproject.toml.
.venv/with-%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@
