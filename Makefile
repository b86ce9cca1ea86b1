# `make train` and `make test` do all the set-up themselves, in .venv. Training needs fewer packages than the tests.
PYTHON ?= python3
CONFIG ?= accelerate_configs/single_gpu.yaml
BIN := .venv/bin
TRAIN := .venv/.train
READY := .venv/.ready
INSTALL := $(BIN)/pip install -qq --disable-pip-version-check --no-compile --constraint constraints.txt --editable

# The tests start hundreds of processes, which would compile all modules of the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all check clean

train: $(TRAIN)
	$(BIN)/accelerate launch --config_file $(CONFIG) recipes/gpt.py $(FLAGS)

# Every promise in its short form.
# Files go to four workers, the slowest files first: two would idle while their processes wait.
test: $(READY)
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder $(TESTS)

# The long forms, and every command of README and docs.
test-all: $(READY)
	LLMTRAIN_LONG=1 $(BIN)/pytest -n 3 --dist worksteal -m "long and not measures" --timeout 1200 $(TESTS)
	LLMTRAIN_LONG=1 $(BIN)/pytest -m measures tests/test_lessons.py  # nothing else may run beside them

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python tools/size.py

# Without bytecode: pip takes as long to compile all modules as to install them, and a run imports a tenth of them.
$(TRAIN): setup.cfg setup.py pyproject.toml constraints.txt
	@echo "installing what training needs into .venv (once; half a minute)"
	@$(PYTHON) -m venv .venv
	@$(INSTALL) '.[lora,lab]'
	@echo "installed; the first start compiles what it imports (half a minute)"
	@touch $@

# The tests start hundreds of processes, so here all modules are compiled, on all cores. A file of torch's that is
# written for newer Pythons fails; it is never imported.
$(READY): $(TRAIN)
	@echo "installing what the tests need into .venv (once; a minute or two)"
	@$(INSTALL) '.[dev]'
	@echo "compiling what was installed, on all cores (once; half a minute)"
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache

# Every table of docs/explanation/performance.md, against other packages: about an hour on two cores that do nothing else.
# NANOGPT: a checkout of github.com/karpathy/nanoGPT; TEXT: for time_to_loss; TABLES: some of them.
bench: $(READY)
	$(BIN)/python -m benchmarks $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(if $(TEXT),--text $(TEXT)) $(TABLES)
.PHONY: bench

# The documentation site, in docs/_build; a warning is an error.
docs: $(READY)
	$(BIN)/python docs/generate_reference.py
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build
.PHONY: docs

# The proof that a run is the same on any layout: about three minutes on two cores. docs/explanation/layouts.md keeps its table.
VERIFY := $(BIN)/llmtrain verify layout --steps 20
SMALL := recipes/gpt.py --n_layer 2 --n_head 2 --n_embd 64 --block_size 64 --eval_fraction 0.005 --dropout 0.1
TWO_ROWS := $(SMALL) --global_batch_size 8 --per_device_train_batch_size 2
verify: $(READY)
	$(VERIFY) --layouts 1,2,4 $(TWO_ROWS)
	$(VERIFY) --layouts 3 $(SMALL) --global_batch_size 24 --per_device_train_batch_size 4
	$(VERIFY) --layouts 1,2,4 --float64 $(TWO_ROWS)
	$(VERIFY) --layouts 2,4 $(TWO_ROWS) --bitwise
.PHONY: verify

# Every lesson, compared with what docs/explanation/ddp.md shows.
learn: $(READY)
	LLMTRAIN_LONG=1 $(BIN)/pytest tests/test_lessons.py
.PHONY: learn

# Every digit of short runs against those of another commit: five minutes on two cores. WEIGHTS=base: all of them begin
# with the weights of that commit, for a change of random weights.
digits: $(READY)
	LLMTRAIN_BASE=$(or $(BASE),HEAD~1) LLMTRAIN_WEIGHTS=$(WEIGHTS) $(BIN)/pytest tests/system/test_digits.py
.PHONY: digits

# Campaigns: the same tests, many times; they end with a scoreboard.
# 100 two-rank launches on a busy machine: about 15 minutes on two cores.
launches: $(READY)
	LLMTRAIN_LONG=1 LLMTRAIN_LAUNCHES=$(or $(LAUNCHES),100) $(BIN)/pytest --timeout 7200 tests/system/test_exit.py
# Kills, crashes, corruption, hangs and signals, many times each; `make test-all` has the rest.
CAMPAIGNS := tests/record/test_crashes.py tests/record/test_untrusted.py tests/system/test_faults.py tests/system/test_kills.py \
	tests/system/test_signals.py tests/system/test_failing_disk.py
torture: $(READY)
	LLMTRAIN_LONG=1 LLMTRAIN_KILLS=$(or $(KILLS),40) LLMTRAIN_WRITER_KILLS=1000 LLMTRAIN_CORRUPTIONS=200 \
	LLMTRAIN_FAULT_TIMES=10 LLMTRAIN_MOMENTS=30 LLMTRAIN_STOPPED_SECONDS=60 LLMTRAIN_ALL_ERRORS=1 \
	$(BIN)/pytest --timeout 3600 $(CAMPAIGNS)
# The benchmark of a GPU on the CPU, with faults planted: before it runs on a card.
rehearse: $(READY)
	LLMTRAIN_REHEARSE=1 $(BIN)/pytest tests/benchmarks/test_gpu.py
.PHONY: launches torture rehearse
