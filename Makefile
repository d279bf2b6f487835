# Two commands matter: `make demo` trains a small GPT on two ranks, `make test` runs the quick tests.
# Both first check the machine, make .venv with pinned packages and build the engine into
# python/shardwright (an editable install). `make` alone builds.

CC ?= gcc
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Three processes, of which what looks at time has the highest priority (tests/conftest.py)
SIDE_BY_SIDE := -n 3
TORCH ?=
# The first Python >= 3.10 that has its headers and venv. Torch's wheels decide the order.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.10; do \
	$$python -c 'import ensurepip, os, sys, sysconfig, venv; \
sys.exit(sys.version_info < (3, 10) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
	2>/dev/null && { echo $$python; break; }; done)

export SW_WERROR ?= 1
# Tests start many programs, and each would compile the package anew
unexport PYTHONDONTWRITEBYTECODE
MAKEFLAGS += --no-print-directory
CSRC := $(sort $(shell find csrc csrc_check -name '*.[ch]'))
KERNEL_TEXT := $(sort $(shell find csrc -name "*.cu*"))
PYTHON_TEXT := setup.py python tests examples benchmarks docs/site .ci
BUILD_INPUTS := $(CSRC) $(KERNEL_TEXT) setup.py pyproject.toml
# .abi3, or of its own version alone by a free-threaded Python
ENGINE := python/shardwright/_engine.*.so

FUZZ_SECONDS ?= 60

.PHONY: build demo test test-fast test-long test-torch test-torch-suites test-without-numpy test-wheel abi asan asan-quick tsan crash fuzz fuzz-programs mutate-events mutate-events-unseen kernels gpu bench docs fmt lint wheel clean check-machine release test-aarch64 test-musl test-free-threaded

build: $(VENV)/.built

check-machine:
	@command -v "$(firstword $(CC))" >/dev/null || \
		{ echo "The C compiler '$(CC)' was not found: install gcc, or name one with CC=." >&2; exit 1; }
	@test -n "$(PYTHON)" && command -v "$(PYTHON)" >/dev/null || \
		{ echo "No Python >= 3.10 with headers (Python.h) and venv was found: install python3-dev and python3-venv, or name one with PYTHON=." >&2; exit 1; }
	@echo 'int main(void) { return 0; }' | $(CC) -x c -o /dev/null - 2>/dev/null || \
		{ echo "'$(CC)' cannot link a program: install the C library's headers (libc6-dev)." >&2; exit 1; }

$(BIN)/python: | check-machine
	$(PYTHON) -m venv $(VENV)

# A stamp is touched last: an interrupted step runs again.
$(VENV)/.installed: requirements/dev.txt requirements/torch.txt requirements/tools.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	@touch $@

# Once: the editable install writes the path file and the `shardwright` command.
$(VENV)/.editable: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# After each change of a C file: only the changed objects and the link.
$(VENV)/.built: $(BUILD_INPUTS) $(VENV)/.editable
	$(BIN)/python setup.py --quiet build_ext --inplace
	@ls $(ENGINE) > /dev/null && touch $@

demo: build
	$(BIN)/torchrun --nproc-per-node 2 --standalone examples/train_gpt.py

# What tests/test_abi.py compares with, out of pip packages. Where they cannot be had the tests skip, and the next run tries again.
$(VENV)/.headers: requirements/abi.txt tests/abi/headers.py | $(BIN)/python
	@$(BIN)/python tests/abi/headers.py $(VENV)/headers requirements/abi.txt && touch $@ || true

test: build $(VENV)/.headers
	SW_TEST_WORLDS=$${SW_TEST_WORLDS:-1,3} $(BIN)/python -m pytest --each-choice $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# The inner loop: tests without ranks and laws of up to two, in files that take little time (tests/conftest.py)
test-fast: build
	SW_TEST_WORLDS=2 $(BIN)/python -m pytest --fast -n 2 $(PYTEST_ARGS)

test-long: build $(VENV)/.headers
	SW_TEST_WORLDS=1,2,3,5 SW_TEST_LONG=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# The wheel, imported on each Python of the machine
test-wheel: build
	$(BIN)/python -m pytest tests/test_wheel.py $(PYTEST_ARGS)

# Declarations of foreign interfaces against more of their headers: 2.5 GB to download, 200 MB that stay
abi: build
	$(BIN)/python tests/abi/headers.py $(VENV)/headers requirements/abi.txt requirements/abi-more.txt
	$(BIN)/python -m pytest tests/test_abi.py $(PYTEST_ARGS)

# The quick form on another torch, in an environment of its own: make test-torch TORCH=2.4.1
test-torch: build
	@test -n "$(TORCH)" || { echo "Name the torch to test: make test-torch TORCH=2.4.1" >&2; exit 1; }
	@test -x .venv-torch-$(TORCH)/bin/python || $(BIN)/python -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install --quiet -r requirements/tools.txt torch==$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	SW_TEST_WORLDS=1,3 .venv-torch-$(TORCH)/bin/python -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# Tests where no process can import numpy. torch's all_gather_object, which the oracle of -k naive calls, needs it
WITHOUT_NUMPY := tests/ranks/test_every_stage_has_the_same_bits.py tests/ranks/test_checkpoint_resume_is_bitwise.py \
	tests/ranks/test_the_package_needs_no_numpy.py

test-without-numpy: build
	@mkdir -p build/without-numpy && echo 'import sys; sys.modules["numpy"] = None' > build/without-numpy/sitecustomize.py
	PYTHONPATH=build/without-numpy $(BIN)/python -m pytest $(WITHOUT_NUMPY) -k 'not naive' $(PYTEST_ARGS)

# The engine as a free-threaded Python builds it, in an environment of its own: make test-free-threaded FREE_THREADED=python3.13t
FREE_THREADED_TESTS := tests/test_free_threaded.py tests/test_bindings.py tests/ranks/test_every_stage_has_the_same_bits.py \
	tests/ranks/test_checkpoint_resume_is_bitwise.py tests/ranks/test_fully_shard_has_the_contract_of_fsdp2.py

test-free-threaded:
	@test -n "$(FREE_THREADED)" || { echo "Name the Python to test: make test-free-threaded FREE_THREADED=python3.13t" >&2; exit 1; }
	@test -x .venv-free-threaded/bin/python || $(FREE_THREADED) -m venv .venv-free-threaded
	.venv-free-threaded/bin/python -m pip install --quiet -r requirements/free-threaded.txt
	.venv-free-threaded/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	SW_TEST_WORLDS=1,3 .venv-free-threaded/bin/python -m pytest --each-choice -n 2 $(FREE_THREADED_TESTS) $(PYTEST_ARGS)

$(VENV)/.suites: requirements/torch-suites.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -r requirements/torch-suites.txt
	@touch $@

# torch's own tests of DistributedDataParallel, out of the installed torch, with our class in its place: SUITES="--verbose test_ddp_inference"
test-torch-suites: build $(VENV)/.suites
	$(BIN)/python tests/torch_suites $(SUITES)

# The C tests under address and undefined-behaviour sanitizers
asan-quick: build
	SW_TEST_MODES=asan $(BIN)/python -m pytest tests/test_csrc.py -k asan -n 2 $(PYTEST_ARGS)

asan: asan-quick
	SW_TEST_LONG=1 $(BIN)/python -m pytest tests/test_fake_gpu.py -k asan $(PYTEST_ARGS)
	SW_TEST_LONG=1 $(BIN)/python -m pytest tests/test_bindings_under_faults.py -k address $(PYTEST_ARGS)

tsan: build
	SW_TEST_LONG=1 $(BIN)/python -m pytest tests/test_csrc.py tests/test_fake_gpu.py -k tsan $(PYTEST_ARGS)
	SW_TEST_LONG=1 $(BIN)/python -m pytest tests/test_bindings_under_faults.py -k thread $(PYTEST_ARGS)

# A checkpoint's save cut at every system call, and by power loss: the long form
crash: build
	SW_TEST_LONG=1 $(BIN)/python -m pytest tests/test_csrc.py -k "checkpoint_crash and plain" $(PYTEST_ARGS)
	SW_TEST_LONG=1 $(BIN)/python -m pytest tests/ranks/test_checkpoint_survives_kill_at_any_moment.py $(PYTEST_ARGS)

# Files and messages of any bytes (tests/csrc/test_*_fuzz.c): libFuzzer where clang has it, else random changes of sound ones
FUZZ_FLAGS := -std=c11 -O1 -g -D_GNU_SOURCE -pthread -Icsrc -Itests/csrc -fsanitize=address,undefined -fno-sanitize-recover=all
FUZZ_OBJECTS := $(patsubst %.c,build/fuzz/%.o,$(filter-out csrc/python/% csrc_check/%,$(filter %.c,$(CSRC))) tests/csrc/fuzz.c)
FUZZ_TESTS := $(patsubst tests/csrc/%.c,%,$(wildcard tests/csrc/test_*_fuzz.c))

build/fuzz/with: # the compiler and its flags
	@mkdir -p $(@D)
	@if echo 'int LLVMFuzzerTestOneInput(void); int LLVMFuzzerTestOneInput(void) { return 0; }' | \
		clang -fsanitize=fuzzer,address -x c - -o build/fuzz/probe 2>/dev/null; \
	then echo clang -fsanitize=fuzzer-no-link -DSW_LIBFUZZER > $@; else echo $(CC) > $@; fi

# Many functions made of few texts take the compiler eight times as long with optimisation
build/fuzz/csrc/kernels/host/compress_%.o: FUZZ_FLAGS += -O0

build/fuzz/%.o: %.c build/fuzz/with $(filter %.h,$(CSRC))
	@mkdir -p $(@D)
	@$$(cat build/fuzz/with) $(FUZZ_FLAGS) -c $< -o $@

build/fuzz/engine.a: $(FUZZ_OBJECTS)
	@rm -f $@ && ar rcs $@ $^

fuzz: build/fuzz/engine.a
	@mkdir -p build/fuzz/corpus/test_checkpoint_fuzz # seeds: the golden manifest, and the golden header before its 539 bytes of data
	@{ printf 0; sed 's/,"self_crc32c.*//' tests/golden/checkpoint/MANIFEST.json; } > build/fuzz/corpus/test_checkpoint_fuzz/manifest
	@{ printf '2\033\002'; tail -c +9 tests/golden/checkpoint/model.safetensors | head -c 4088; } > build/fuzz/corpus/test_checkpoint_fuzz/header
	@for test in $(FUZZ_TESTS); do mkdir -p build/fuzz/corpus/$$test; echo "== $$test"; with=$$(cat build/fuzz/with); \
		case $$with in clang*) driver=-fsanitize=fuzzer;; *) driver=;; esac; \
		$$with $(FUZZ_FLAGS) $$driver tests/csrc/$$test.c build/fuzz/engine.a -lm -ldl -o build/fuzz/$$test || exit 1; \
		if [ "$$driver" ]; then build/fuzz/$$test -max_total_time=$(FUZZ_SECONDS) -max_len=4096 \
			-artifact_prefix=build/fuzz/ build/fuzz/corpus/$$test || exit 1; \
		else timeout $(FUZZ_SECONDS) build/fuzz/$$test 1000000000; [ $$? = 124 ] || exit 1; fi; done

# Random training programs against a naive oracle: make fuzz-programs PROGRAMS=1000 SEED=7. One that ends wrongly is printed, as
# small as can be; `$(BIN)/python tests/programs FILE` runs it again
PROGRAMS ?= 10000
SEED ?= 1

fuzz-programs: build
	$(BIN)/python tests/programs --seed $(SEED) --count $(PROGRAMS)

# Each event wait and host wait of the GPU path deleted, and each event recorded in the wrong place, in turn: a test on the
# simulated GPUs must fail; then again with scenes of compositions alone (tensor parallelism, pipelines, experts)
mutate-events: build
	SW_TEST_LONG=1 $(BIN)/python -m pytest tests/test_event_mutations.py tests/test_event_mutations_of_compositions.py $(PYTEST_ARGS)

# Also those mutations of compositions that no scene sees, for the reasons in UNSEEN: an hour more
mutate-events-unseen: build
	SW_TEST_LONG=1 SW_TEST_UNSEEN=1 $(BIN)/python -m pytest tests/test_event_mutations_of_compositions.py $(PYTEST_ARGS)

# Machine code of the GPU kernels for each architecture that nvcc knows, each from its own front end: no kernel may spill
kernels: build
	SW_TEST_LONG=1 $(BIN)/python -m pytest tests/test_device_kernels.py -k nvcc $(PYTEST_ARGS)

# The first quarter of an hour on a card: a table, gpu-report.json and gpu-report.html. GPU_ARGS="--within 540"
gpu: build
	$(BIN)/shardwright gpu-check --to benchmarks/results/gpu $(GPU_ARGS)

bench: build
	@for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(BIN)/python $$bench --quick || exit 1; done

# The documentation site in site/: once the packages are there, without network. A warning or a broken link is an error
DOCS := .venv-docs
$(DOCS)/.installed: requirements/docs.txt | check-machine
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r requirements/docs.txt
	@touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	$(DOCS)/bin/python docs/site/links.py site

$(VENV)/.fmt: requirements/fmt.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements/fmt.txt
	@touch $@

fmt: $(VENV)/.fmt
	$(BIN)/clang-format -i $(CSRC) $(wildcard tests/csrc/*.[ch])
	$(BIN)/ruff format --quiet $(PYTHON_TEXT)

# Style, types, and _engine.pyi against the engine that was built. It changes no file.
lint: build $(VENV)/.fmt
	$(BIN)/clang-format --dry-run -Werror $(CSRC) $(wildcard tests/csrc/*.[ch])
	$(BIN)/ruff check $(PYTHON_TEXT)
	$(BIN)/ruff format --check --quiet $(PYTHON_TEXT)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/mypy
	MYPYPATH=python $(BIN)/python -m mypy.stubtest shardwright._engine shardwright._engine_check

wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

$(VENV)/.release: requirements/release.txt requirements/tools.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements/tools.txt -r requirements/release.txt
	@touch $@

# The sdist, manylinux wheels for x86_64 and aarch64, the bill of materials and checksums, in dist/
release: $(VENV)/.release
	PYTHON=$(BIN)/python .ci/release

# The C tests on another processor's code: needs gcc-aarch64-linux-gnu and qemu-user
test-aarch64: build
	SW_TEST_MODES=aarch64 $(BIN)/python -m pytest tests/test_csrc.py -k aarch64 -n 2 $(PYTEST_ARGS)

# The C tests with musl's C library in the place of glibc: needs musl-tools
test-musl: build
	SW_TEST_MODES=musl $(BIN)/python -m pytest tests/test_csrc.py -k musl -n 2 $(PYTEST_ARGS)

clean:
	rm -rf build dist $(ENGINE) python/shardwright/_engine_check.*.so $(VENV)/.built .pytest_cache
