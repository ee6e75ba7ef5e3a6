# One line a target: make help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt tools/build_backend.py $(wildcard src/syncline/native/*.[ch])
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
RANKS ?= 2
EPOCHS ?= 15

PROGRAMS ?= 20000
SEED ?= 0

# Two test processes, each of which takes whole files, in the order of tests/conftest.py: ranks stay warm in it.
WORKERS ?= 2
IN_WORKERS := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# More flags for pytest: tools/gate.py has some.
PYTEST_FLAGS ?=
# make test-frameworks has the one folder, make check the other
PYTEST := $(BIN)/python -m pytest $(IN_WORKERS) --ignore tests/frameworks --ignore tests/architecture $(PYTEST_FLAGS)
# Without byte code, each process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Accelerate, Transformers, Lightning, Ray and others, pinned, in a virtual environment of their own.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed
TEST_FRAMEWORKS ?= tests/frameworks
NIGHTLY ?= not nightly

.PHONY: help setup train test test-all goldens ratchet pictures test-timing test-nightly test-gpu test-torch test-frameworks docs docs-serve wheels soak failure-matrix fuzz check \
	format bench bench-baseline bench-compare clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv with everything

# Only what training needs, so that `make train` does not wait for the tools of the tests.
$(PACKAGE): constraints.txt pyproject.toml $(NATIVE)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing syncline and torch into $(VENV); the first time, the download of torch can take minutes ..."
	$(PIP) scikit-build-core cmake ninja
	$(PIP) --no-build-isolation --editable ".[examples]"
	@touch $@

$(STAMP): $(PACKAGE) requirements-dev.txt
	@echo "installing the tools of the tests into $(VENV); the first time, their download can take minutes ..."
	$(PIP) --requirement requirements-dev.txt
	@touch $@

train: $(PACKAGE) ## fetch the digits and train on them with 2 processes
	$(BIN)/python examples/example_data.py
	$(BIN)/syncline run -n $(RANKS) examples/mnist_cnn.py --epochs $(EPOCHS)

test: $(STAMP) ## the first tier: certain and fast, whatever else the machine does
	$(PYTEST) -m "not real and not timing and not nightly"

test-all: $(STAMP) ## all that each change must pass: also kills, launchers, hosts, sanitizers
	$(PYTEST) -m "not timing and not nightly"

goldens: $(STAMP) ## write the whole printed reports in tests/goldens anew; look at what git shows of them
	SYNCLINE_GOLDENS=write $(BIN)/python -m pytest -q $$(grep -rl 'import assert_golden' tests --include 'test_*.py')

ratchet: $(STAMP) ## write what has become smaller into tests/architecture/ratchets.toml
	SYNCLINE_RATCHETS=write $(BIN)/python -m pytest -q tests/architecture/test_ratchets.py

test-timing: $(STAMP) ## what compares times, alone on a quiet machine
	SYNCLINE_PATIENCE=1 $(PYTEST) -m timing --numprocesses 0 --durations 25

test-nightly: $(STAMP) $(FRAMEWORKS_STAMP) ## what changes do not run: full products, packages, Ray, MPI, SLURM at length
	HYPOTHESIS_PROFILE=nightly $(PYTEST) -m "not timing" --write-durations --durations 25
	$(MAKE) test-frameworks NIGHTLY=nightly

# On a machine whose Python has its own torch for its GPUs: make test-gpu PYTHON=python3.12
GPU_PYTHON := $(if $(filter command line environment,$(origin PYTHON)),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)))
TEST_GPU ?= tests/gpu
test-gpu: ## run the tests that need a GPU, or two, with .venv or PYTHON=...; everything is skipped without one
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:cacheprovider -W default -rs $(TEST_GPU)

wheels: $(STAMP) ## build dist/: the sdist, wheels for Linux on x86-64 and aarch64, a pure wheel
	$(BIN)/python tools/wheels.py dist

soak: $(STAMP) ## what is drawn by lot, for hours: kills, collectives, flipped bits, stops, programs
	$(BIN)/python tests/fault/kills.py --kills 200 --seed $(SEED)
	PYTHONPATH=tests $(BIN)/python tests/fault/elastic_drawn.py --runs 500 --seed $(SEED)
	PYTHONPATH=tests $(BIN)/python tests/fault/elastic_pairs.py --pairs 200 --awaits --seed $(SEED)
	$(BIN)/python tests/fault/elastic_soak.py --kills 200 --seed $(SEED)
	$(BIN)/python tests/fault/elastic_soak.py --seconds 600 --seed $(SEED)
	$(BIN)/python tests/fault/soak.py --seconds 600 --seed $(SEED)
	for strategy in every-step sharded local-sgd gossip; do \
		folder=$$(mktemp -d) && $(BIN)/python tests/fault/asked_to_stop.py $$folder $$strategy 30 $(SEED) \
			&& rm -r $$folder || exit 1; \
	done
	folder=$$(mktemp -d) && $(BIN)/python tests/fault/flipped_bits.py $$folder 500 $(SEED) && rm -r $$folder
	$(MAKE) fuzz

failure-matrix: $(STAMP) ## provoke every failure, and write docs/reference/failure-matrix.md (some minutes)
	$(BIN)/python tests/failure_rows.py

fuzz: $(STAMP) ## run 20,000 drawn training programs under torch's class and ours
	$(BIN)/python -m tests.fuzz --programs $(PROGRAMS) --seed $(SEED)

check: $(STAMP) ## lint, format, strict types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/architecture

# The generator's notice about its successor is answered in docs/inside/decisions/0014-the-site.md.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1

docs: $(STAMP) ## build the documentation site into site/
	$(BIN)/mkdocs build --strict
	@echo "site/index.html, $$(find site -name '*.html' | wc -l) pages; make docs-serve shows them"

pictures: $(STAMP) ## make the pictures of the first page anew; look at what git shows of them
	$(BIN)/python examples/example_data.py
	$(BIN)/python docs/pictures/make.py

docs-serve: $(STAMP) ## show the site on http://127.0.0.1:8000, and follow what you write
	$(BIN)/mkdocs serve

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(FRAMEWORKS_STAMP): requirements-frameworks.txt constraints-frameworks.txt pyproject.toml $(NATIVE)
	test -x $(FRAMEWORKS)/bin/pip || $(PYTHON) -m venv $(FRAMEWORKS)
	@echo "downloading the frameworks into $(FRAMEWORKS), once; this can take minutes ..."
	PIP_CONSTRAINT=/dev/null $(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints-frameworks.txt --requirement requirements-frameworks.txt
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

test-frameworks: $(FRAMEWORKS_STAMP) ## test the recipes with the real Accelerate, Transformers, Lightning, Ray, ...
	$(FRAMEWORKS)/bin/python -m pytest -p no:cacheprovider -W default $(IN_WORKERS) -m "$(NIGHTLY)" $(PYTEST_FLAGS) $(TEST_FRAMEWORKS)

MPI_VENVS ?=
BENCH ?= build/bench
BASELINE ?= build/bench-baseline
bench: $(STAMP) ## print the benchmark tables and the goals they meet (keep the machine quiet); BENCH=folder
	rm -rf $(BENCH)
	$(BIN)/syncline run -n 2 benchmarks/collectives.py --json $(BENCH)/collectives.json \
		$(if $(MPI_VENVS),--mpi-venvs $(MPI_VENVS))
	$(BIN)/syncline run -n 4 benchmarks/collectives.py $(if $(MPI_VENVS),--mpi-venvs $(MPI_VENVS))
	$(BIN)/syncline run -n 1 benchmarks/step.py --json $(BENCH)/step-1.json
	$(BIN)/syncline run -n 2 benchmarks/step.py --json $(BENCH)/step-2.json
	$(BIN)/syncline run -n 2 benchmarks/step.py --variants
	$(BIN)/syncline run -n 2 benchmarks/tensors.py --json $(BENCH)/tensors.json
	$(BIN)/syncline run -n 1 benchmarks/tensors.py --tiny --json $(BENCH)/tiny-1.json
	$(BIN)/syncline run -n 2 benchmarks/tensors.py --tiny --json $(BENCH)/tiny-2.json
	$(BIN)/syncline run -n 2 benchmarks/verbs.py --json $(BENCH)/verbs.json
	$(BIN)/syncline run -n 2 benchmarks/compression.py --json $(BENCH)/compression.json
	$(BIN)/syncline run -n 2 benchmarks/backend.py
	$(BIN)/python benchmarks/memory.py --json $(BENCH)/memory.json
	$(BIN)/python benchmarks/scale.py --json $(BENCH)/scale.json
	-$(BIN)/python benchmarks/hosts.py --json $(BENCH)/hosts.json  # needs root, as the next one
	-$(BIN)/python benchmarks/slow_steps.py --json $(BENCH)/slow-steps.json
	$(BIN)/python benchmarks/compare.py $(BENCH)

bench-baseline: ## measure the baseline for make bench-compare; BASELINE=folder
	$(if $(filter command,$(word 1,$(origin BENCH))),$(error make bench-baseline: expected BASELINE=$(BENCH), got BENCH=$(BENCH)))
	$(MAKE) bench BENCH=$(BASELINE)

bench-compare: $(STAMP) ## measure again, and fail if a figure is worse than in the baseline by more than noise
	$(BIN)/python benchmarks/compare.py --check $(BASELINE) $(BENCH)
	$(MAKE) bench
	$(BIN)/python benchmarks/compare.py $(BASELINE) $(BENCH)

clean: ## remove .venv and caches (downloaded data stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Another torch, in a virtual environment of its own: .venv stays as it is. The package is copied into it.
# A limit on torch in pip's own configuration does not apply.
TORCH ?= 2.15.0
TEST_VENV ?= .venv-torch-$(TORCH)
TEST_TORCH ?= tests/architecture/test_private_names.py tests/parity tests/transport tests/state
test-torch: ## run the tests of the class, the transports and checkpoints with another torch (TORCH=2.15.0)
	test -x $(TEST_VENV)/bin/python || $(PYTHON) -m venv $(TEST_VENV)
	sed '/^torch==/d' constraints.txt > $(TEST_VENV)/constraints.txt
	@echo "downloading torch $(TORCH) into $(TEST_VENV), once; this can take minutes ..."
	PIP_CONSTRAINT=/dev/null $(TEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(TEST_VENV)/constraints.txt --requirement requirements-dev.txt torch==$(TORCH)
	$(TEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps .
	$(TEST_VENV)/bin/python -m pytest -p no:cacheprovider $(IN_WORKERS) $(TEST_TORCH)
