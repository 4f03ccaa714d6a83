# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOG := $(VENV)/install.log
ARGS ?=

# pip warns of every requirement that is left out on purpose: what it says goes to a log, and is shown where it fails.
pip = $(BIN)/pip install --disable-pip-version-check --progress-bar off $(1) >>$(LOG) 2>&1 || \
  { { tail -n 40 $(LOG); echo "pip failed. All that it said is in $(LOG)"; } >&2; exit 1; }

.PHONY: install demo up test test-all test-ceph soak lint bench clean

install: $(INSTALLED)

# One environment for all parts. Nothing is resolved: every version stands in constraints.txt.
$(INSTALLED): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 12))' || \
	  { echo "Python 3.11 is needed (found: $$($(PYTHON) --version 2>&1)). Try: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing about 240 pinned packages into $(VENV) (2-5 minutes, 2.9 GB; log: $(LOG)) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(LOG)
	@$(call pip,--no-deps -r constraints.txt)
	@$(call pip,--no-deps --no-build-isolation -e .)
	@# An index that serves no CPU build of torch gives the CUDA one, which does not import without its libraries.
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "torch came as its CUDA build: its libraries too (3 GB) ..."; \
	  $(call pip,"$$(grep '^torch==' constraints.txt)"); $(BIN)/python -c 'import torch'; }
	touch $(INSTALLED)

demo: install
	$(BIN)/eagle3 demo $(ARGS)

up: install
	$(BIN)/eagle3 up $(ARGS)

# What runs in under 20 minutes on 2 cores.
test: install
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

# Everything, the whole demo pipeline on the real small model included.
test-all: install
	$(BIN)/python -m pytest $(ARGS)

# The store against Debian's Ceph RGW. Installs nothing: it says what is missing.
test-ceph: install
	@$(BIN)/python -m tests.integration.rgw_server
	$(BIN)/python -m pytest tests/integration/test_store_ceph.py $(ARGS)

# SGLang, the flow process and the worker, killed at twenty random moments of an extraction: an hour and more.
soak: install
	EAGLE3_KILLS=20 $(BIN)/python -m pytest tests/e2e/test_killed.py $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_file_sizes.py

# The quick ones; benchmarks/memory.py takes a quarter of an hour, story.py and clean_dumps.py half an hour each
# (docs/benchmarks.md, docs/story.md, docs/evidence.md).
bench: install
	@for script in benchmarks/tap.py benchmarks/store.py benchmarks/verify.py benchmarks/attribution.py; do echo "== $$script"; $(BIN)/python $$script $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
