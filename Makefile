# SPDX-License-Identifier: Apache-2.0
# `make smoke` and `make test` do all the set-up they need; everything goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A GPU host takes torch as the package index gives it; a CPU machine takes the pinned CPU release.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)
PYTEST := $(BIN)/python -m pytest

.PHONY: help smoke test lint docs-check install bench soak clean require-jq

help:
	@echo "make smoke          install, then run suites/smoke.yaml on this machine (no GPU, no account)"
	@echo "make test           install, then run every test"
	@echo "make lint           ruff, mypy, import-linter, licence headers, docstring coverage, docs-check"
	@echo "make docs-check     tests that the pages name are collected, links and commands are right"
	@echo "make bench          time check_metrics on a 28 MB metrics.json, and trends and nights of a long history"
	@echo "make soak           the long runs: fuzzing of the expression parser, selftest --full, the benches, real step times"
	@echo "make clean          remove .venv and caches"

require-jq:
	@command -v jq >/dev/null || { echo "jq is not installed, and the drivers need it: install it with your package manager (apt-get install jq)" >&2; exit 2; }

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed (PYTHON=... make)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[all,dev]'
	touch $@

install: require-jq $(STAMP)

smoke: install
	$(BIN)/lora-suite run suites/smoke.yaml

test: install
	$(PYTEST) -n 2 --dist worksteal -m 'not train'
	$(PYTEST) -m train

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy check_metrics lora_suite
	$(BIN)/lint-imports
	$(BIN)/python tools/spdx.py
	$(BIN)/interrogate --quiet check_metrics lora_suite
	$(BIN)/python tools/docs_check.py

docs-check: install
	$(BIN)/python tools/docs_check.py

bench: install
	$(PYTEST) tests/bench --benchmark-only -n 0

# Rows of the selftest that need recorded trainings are skipped unless LORA_SUITE_DATA names their folder.
soak: install bench
	$(BIN)/python tests/check_metrics/fuzz_parser.py --seconds 600
	$(BIN)/lora-suite selftest --full
# On a machine that does nothing else: plain PEFT takes our time, and three times that is seen.
	$(BIN)/lora-suite run suites/external_example.yaml
	$(BIN)/lora-suite run suites/external_example.yaml --arm external:--slow=3; test $$? -eq 1

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis results
