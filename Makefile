# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer, venv, pip and make.
PYTHON ?= python3
# The version that is tested. Name another to try it: make test TORCH=torch
TORCH ?= torch==2.13.0
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# What runs with the lowest versions that the extras ask for: the integrations, and the command. Tests
# of whole servers are about uvicorn and others, which are as new as ever.
OLDEST_TESTS := $(filter-out %servers.py,$(wildcard tests/fastapi/test_*.py)) \
	tests/edge/test_opentelemetry.py::test_batch_span_links_requests_and_contains_model_spans \
	tests/edge/test_doctor.py::test_a_model_is_loaded_and_timed \
	tests/edge/test_prometheus.py::test_metrics_coexist_with_metrics_of_app \
	tests/edge/test_tune.py::test_the_command_measures_and_recommends \
	tests/edge/test_load_client.py
# What a user may install; the other extras are of this repository.
EXTRAS := fastapi,json,prometheus,cli,opentelemetry,ray,torch
# Where it is set, each of the thousands of processes that the tests start compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE
# Tests that run side by side, on two cores: they wait for processes a third of the time.
JOBS ?= 3

.PHONY: help install fix check test check-docs test-oldest test-fast cov demo bench-setup bench bench-all soak publish docs dist clean

help:
	@echo 'make demo         sentence embeddings behind FastAPI, batched against unbatched: a table, a picture'
	@echo 'make test         formatting, lint, types, and the tests of the code'
	@echo 'make check-docs   the tests of README, docs, docker, deploy and the site'
	@echo 'make test-oldest  the tests of the integrations and the command with the lowest versions supported'
	@echo 'make test-fast    the tests without processes and servers, in half a minute'
	@echo 'make fix          format and mend what can be mended'
	@echo 'make cov          every test with branch coverage, child processes included'
	@echo 'make bench-setup  the compared libraries from PyPI, each in an environment of its own'
	@echo 'make bench        a short form of the benchmarks, in less than 10 minutes'
	@echo 'make bench-all    all of them in full, three hours; their results are what is published'
	@echo 'make soak         long runs with deliberate faults, forty minutes'
	@echo 'make publish      the README tables from the stored results'
	@echo 'make docs         the documentation as a site, in site/'
	@echo 'make dist         the packages for PyPI, checked, and their software bill of materials'
	@echo 'make clean        remove what these commands have made'

install: .venv/installed

# torch first, so that nothing else chooses its version. What is imported is compiled when it is: that
# is a small part of what torch and transformers bring, and compiling all of it takes a minute.
.venv/demo: pyproject.toml
	@echo 'Installing PyTorch, FastAPI and a sentence embedding model into .venv: once, some minutes'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --no-compile '$(TORCH)'
	$(BIN)/pip install --disable-pip-version-check --no-compile -e '.[demo]'
	touch $@

.venv/installed: .venv/demo
	@echo 'Installing the tools of tests and benchmarks into .venv'
	$(BIN)/pip install --disable-pip-version-check --no-compile -e '.[dev]'
	touch $@

# All that .venv has, but for what the extras need.
.venv-oldest/installed: .venv/installed .ci/minima.py
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/pip install --disable-pip-version-check --no-compile httpx \
		$$($(BIN)/python .ci/minima.py)
	.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-oldest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
	touch $@

fix: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy --num-workers 2

# Neighbours stay together, so that what a module's tests share is made once and not once per job.
test: check
	$(PYTEST) --numprocesses $(JOBS) --dist worksteal --ignore tests/documents

# A change of the code can break a document too: CI runs both.
check-docs: install
	$(PYTEST) --numprocesses $(JOBS) --dist worksteal tests/documents

# Old versions use what newer ones of their own requirements warn about.
test-oldest: .venv-oldest/installed
	PYTHONPATH=$(CURDIR) .venv-oldest/bin/python -m pytest --numprocesses $(JOBS) \
		--override-ini filterwarnings=default \
		$(OLDEST_TESTS)

test-fast: install
	$(PYTEST) -m 'not slow and not long' --numprocesses $(JOBS)

cov: install
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

demo: .venv/demo
	@$(BIN)/python -m examples.embeddings.demo

bench-setup: install
	$(BIN)/python -m benchmarks.setup_peers

bench: bench-setup
	$(BIN)/python -m benchmarks.overhead --quick
	$(BIN)/python -m benchmarks.idle_latency --quick
	$(BIN)/python -m benchmarks.saturation --quick
	$(BIN)/python -m benchmarks.peers --quick --parts overhead open-loop

bench-all: bench-setup
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.idle_latency
	$(BIN)/python -m benchmarks.decorators
	$(BIN)/python -m benchmarks.saturation
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.payload
	$(BIN)/python -m benchmarks.hold
	$(BIN)/python -m benchmarks.streams
	$(BIN)/python -m benchmarks.sessions
	$(BIN)/python -m benchmarks.reference_experiment
	$(BIN)/python -m benchmarks.http
	$(BIN)/python -m benchmarks.load_test --batch-sizes 1 8 32
	$(BIN)/python -m benchmarks.simulation
	$(MAKE) publish

soak: install
	$(PYTEST) -m long
	$(PYTEST) --hypothesis-profile random tests/unit
	$(PYTEST) tests/faults/test_fault_matrix.py
	PAIRS_SEED=$$(date +%s) $(PYTEST) tests/pairs
	$(BIN)/python -m benchmarks.soak

publish: install
	$(BIN)/python -m benchmarks.publish

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The bill of materials is of an environment that has the wheel and all EXTRAS, and no pip. Its tool has
# an environment of its own: in .venv it would add a second to each import of Ray, by jsonschema.
dist: install
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv --clear --without-pip .venv-dist
	$(BIN)/pip --python .venv-dist/bin/python install --disable-pip-version-check --no-compile \
		'$(TORCH)' "$$(echo dist/*.whl)[$(EXTRAS)]"
	$(PYTHON) -m venv --clear .venv-bom
	.venv-bom/bin/pip install --disable-pip-version-check --no-compile 'cyclonedx-bom>=7.0,<8'
	.venv-bom/bin/cyclonedx-py environment --output-reproducible \
		--output-file dist/fast_batcher.cdx.json .venv-dist/bin/python

clean:
	rm -rf .venv .venv-bom .venv-dist .venv-oldest .venv-peers .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
