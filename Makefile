# Set-up and the few commands of every day. Each sets up what it needs first, once.
#
#   make demo    run a part of the main scenario: eager against graphed parts of experts, on 8 ranks
#   make test    the tests, but for those marked long
#   make long    the tests of ranks that are marked long: a thousand (many minutes)
#   make coverage  the same, and which lines of the packages they reach (a fifth slower)
#   make lint    ruff, mypy, import layers, schemas of the CI templates, spelling
#   make bench   the benchmarks that need no GPU
#   make parity  every layout against one process, in units of rounding: out/parity (20 minutes)
#   make nightly long tests, parity, all legal layouts counted, the tiers pr and nightly (hours on 2 cores)
#   make soak    replays by the hundred under stressors in turn (minutes), what soaks find (planted),
#                then graphs over a hundred steps under every stressor, each stressor alone (hours)
#   make eight   all that is to be shown on a machine of 8 GPUs (benchmarks/README.md, "Eight ranks"; hours)
#   make venv    only the environment that `make demo` uses
#
# PYTHON   the interpreter to build on (its torch is used, if it has one)
# VENV     the environment's folder
# DEVICE   cpu, cuda or auto, for `make demo` and `make nightly`; soaks are the CPU's
# PARITY_ARGS   of tests.dist.parity_table: `--device cuda --backend te`, `--dtype fp64`, ...

PYTHON ?= python3
VENV ?= .venv
DEVICE ?= auto
SCENARIO ?= scenarios/smoke.yaml::fsdp_cudagraph_alignment
DEMO_ARGS ?= -k ep2
PYTEST_ARGS ?=
PARITY_ARGS ?=
SOAKS := scenarios/soak.yaml::soak_cpu_of_1 scenarios/soak.yaml::soak_cpu_of_4 scenarios/nightly/soak.yaml scenarios/nightly/stress.yaml

BIN := $(VENV)/bin
# A tool that the environment inherits from PYTHON has its program beside PYTHON.
BESIDE = $$(dirname "$$($(PYTHON) -c 'import sys; print(sys.executable)')")
TOOLS = env PATH="$(abspath $(BIN)):$(BESIDE):$$PATH"
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

.PHONY: demo test long coverage lint bench parity nightly soak eight venv clean

demo: $(VENV)/.ready
	$(BIN)/harness run $(SCENARIO) --device $(DEVICE) $(DEMO_ARGS)

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not long" $(PYTEST_ARGS)

long: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n 2 --dist load -m long $(PYTEST_ARGS)

coverage: $(VENV)/.ready-test
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -n 2 --dist loadgroup --cov --cov-report=term -m "not long" $(PYTEST_ARGS)

lint: $(VENV)/.ready-dev
	$(TOOLS) ruff check .
	$(TOOLS) ruff format --check .
	$(BIN)/python -m mypy
	$(TOOLS) lint-imports
	$(TOOLS) check-jsonschema --builtin-schema vendor.github-workflows docs/ci/github/*.yml .github/workflows/*.yml
	$(TOOLS) check-jsonschema --builtin-schema vendor.gitlab-ci --data-transform gitlab-ci docs/ci/gitlab.yml
	$(TOOLS) codespell

bench: $(VENV)/.ready-test
	$(BIN)/python -m benchmarks.digest --device cpu
	$(BIN)/python -m benchmarks.digest --device cpu --corruptions 100000
	$(BIN)/python -m benchmarks.lanes

parity: $(VENV)/.ready-test
	$(BIN)/python -m tests.dist.parity_table --out out/parity $(PARITY_ARGS)

# Everything is run, whatever comes before it says; make fails in the end if any did.
nightly: $(VENV)/.ready-test
	$(BIN)/harness list --count scenarios/nightly
	failed=0; \
	$(BIN)/python -m pytest -n 2 --dist load -m long || failed=1; \
	$(BIN)/python -m tests.dist.parity_table --out out/parity $(PARITY_ARGS) || failed=1; \
	$(BIN)/harness run --tier pr --tier nightly --device $(DEVICE) || failed=1; \
	exit $$failed

# Each part alone on the machine: step times are among what is shown.
EIGHT_LAYOUTS = '{dp: 8}' '{dp: 4, tp: 2, sequence_parallel: true, etp: 2}' \
	'{dp: 4, tp: 2, sequence_parallel: true, ep: 2, etp: 2}' '{dp: 8, ep: 8}' '{cp: 8}' \
	'{dp: 2, tp: 2, pp: 2, sequence_parallel: true, etp: 2}'
eight: $(VENV)/.ready-test
	mkdir -p out/eight
	failed=0; \
	$(BIN)/harness run scenarios/nightly/alignment_of_8.yaml --device cuda || failed=1; \
	$(BIN)/harness run scenarios/nightly/throughput.yaml::throughput_of_8 || failed=1; \
	for backend in torch te; do $(BIN)/python -m benchmarks.scopes --workload launch --ranks 8 --backend $$backend \
		--parallel $(EIGHT_LAYOUTS) --deadline-s 3600 --json out/eight/scopes_$$backend.json || failed=1; done; \
	$(BIN)/python -m benchmarks.fsdp --ranks 8 --deadline-s 3600 --json out/eight/fsdp.json || failed=1; \
	exit $$failed

# What is planted must fail, by a check: exit code 1.
soak: $(VENV)/.ready
	failed=0; \
	code=0; $(BIN)/harness run scenarios/soak.yaml::planted_soak --device cpu || code=$$?; \
	[ $$code = 1 ] || failed=1; \
	for scenario in $(SOAKS); do \
	  $(BIN)/harness run "$$scenario" --device cpu || failed=1; \
	done; exit $$failed

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml .ci/venv
	.ci/venv $(PYTHON) $(VENV)
	touch $@

$(VENV)/.ready-test: pyproject.toml .ci/venv
	.ci/venv $(PYTHON) $(VENV) test
	touch $@ $(VENV)/.ready

$(VENV)/.ready-dev: pyproject.toml .ci/venv
	.ci/venv $(PYTHON) $(VENV) dev
	touch $@ $(VENV)/.ready $(VENV)/.ready-test

clean:
	rm -rf build dist *.egg-info .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache
