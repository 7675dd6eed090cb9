# Two commands do all the set-up: `make train` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# One thread per rank: two ranks share two cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

# Tests of the inner loop, about a minute on two cores: digests, structure, and what is exact.
FAST := golden layout pages verify suffix sampling losses advantages data rows schedule microbatch \
	optimizer config chooser planner proposer store noise kv_cache generator \
	rollout_loop board idle_tasks sampler tail_batching rewards minimal_loop update

.PHONY: train test test-fast durations lint smollm2 clean

CONFIG ?= configs/tiny_cpu.yaml

train: .venv/installed
	$(BIN)/python -m bubblespec train --nproc-per-node 2 --config $(CONFIG)
	$(BIN)/python -m notebooks.run_picture $(CONFIG)

test: .venv/tests lint
	$(BIN)/python -m pytest -q --durations=10 -n logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

test-fast: .venv/tests
	$(BIN)/python -m pytest -q -n 2 --dist=loadfile $(FAST:%=tests/test_%.py)

# CPU seconds of each test file, which fails where one takes more than its budget.
durations: .venv/tests
	$(BIN)/python -m pytest -q -p tests.helpers.durations -n 2 --dist=loadfile --no-loadscope-reorder

lint: .venv/tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

smollm2: .venv/installed
	$(BIN)/pip install -q gguf==0.19.0
	$(BIN)/python -m scripts.fetch_smollm2 --output models/smollm2-135m-instruct

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0 -r requirements.txt  # the version that tests have run with
	$(BIN)/pip install -q --no-build-isolation -e .  # with the setuptools that torch requires
	touch $@

.venv/tests: .venv/installed requirements-test.txt requirements-lora.txt requirements-notebooks.txt
	$(BIN)/pip install -q -r requirements-test.txt
	touch $@

clean:
	rm -rf .venv
