# make demo   a pool on this machine serves a request trace and loses a store on the way
# make test   everything CI checks: formatting, lint, types, tests
# Each makes its own virtual environment in .venv; all they need is Python 3.11 or newer with venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint types pytest chaos-quick chaos zoo bench proto clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(STAMP): pyproject.toml kvops/__init__.py
	@echo "[set-up]   virtual environment (first time: what kvops needs is downloaded)"
	@$(PYTHON) -c 'import sys; sys.exit("kvops needs Python 3.11 or newer, not " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/kvops demo

test: lint types pytest chaos-quick

lint: $(STAMP)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# Tests that start processes wait for most of their time; the others only calculate, and have the other core. Both
# are run to their end, and the second part's report is printed below the first's. A test with processes that failed
# beside all that is run once more by itself, and said to have been: failing twice it fails the whole. Each part has
# temporary folders of its own: pytest clears up those of earlier runs, and stumbles over a run beside it.
pytest: $(STAMP)
	@temporary=$$(mktemp -d); \
	nice -n 5 $(BIN)/pytest -m 'not process' -p no:cacheprovider --basetemp "$$temporary/c" \
	  >$(VENV)/calculating.log 2>&1 & calculating=$$!; \
	$(BIN)/pytest -m process; code=$$?; \
	wait $$calculating; calculated=$$?; \
	rm -rf "$$temporary"; \
	cat $(VENV)/calculating.log; \
	if [ $$code = 1 ]; then \
	  echo "[again] what failed above beside other work, by itself"; \
	  $(BIN)/pytest -m process --last-failed; code=$$?; \
	fi; \
	exit $$((code | calculated))

# Four experiments with real faults, about three minutes: what CI runs. Noise fails nothing, broken promises,
# faults that were not injected, and leftovers do.
chaos-quick: $(STAMP)
	$(BIN)/kvops chaos suite playbooks/experiments --quick --tag ci --allow-unsupported

# The quick experiments: a pool of their own each, real faults, verdicts; about seven minutes, in quiet.
chaos: $(STAMP)
	$(BIN)/kvops chaos suite playbooks/experiments --quick --allow-unsupported

# Every bug of the zoo against the checker that was made for it; about a quarter of an hour.
zoo: $(STAMP)
	KVOPS_ZOO=all $(BIN)/pytest tests/chaos/test_zoo.py

bench: $(STAMP)
	$(BIN)/kvops bench all --quick

# Regenerates kvops/proto; the result is committed. The tools are of the oldest gRPC that pyproject.toml allows,
# since generated code asks for the version that made it or a newer one.
proto:
	@test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	@.venv-proto/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.73.1 setuptools
	.venv-proto/bin/python -m grpc_tools.protoc -Ikvops/proto=proto --python_out=. --pyi_out=. --grpc_python_out=. $$(find proto -name '*.proto')
	@rm -f kvops/proto/kvops/v1/error_pb2_grpc.py

clean:
	rm -rf $(VENV) .venv-proto build dist demo
