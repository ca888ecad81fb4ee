# Needs python3 (3.10 or newer, with venv) and make; versions come from constraints.txt.
#
#   make demo     train the demo policy and write demo.png
#   make test     run the tests            (ARGS="tests/functional -k clip" narrows them)
#   make test-slow   those that compile, export, train or start processes
#   make test-benchmarl   the losses in BenchMARL, with the older TorchRL that it allows
#   make lint     ruff and mypy
#   make bench    side by side with torchrl  (ARGS="nets --compile"; also losses, groups, export)
#   make docs     API pages in build/docs, from the docstrings
#   make notebooks   executes the notebooks into build/notebooks  (ARGS="01 04" for some)
#   make mutate   mutation tests of functional and heads  (ARGS="composite_losses.heads.keys*")
#
# torch is a CPU build unless you ask for another. Where pip would take a CUDA build, it refuses before
# the download, and the wheel comes from CPU_INDEX.
#   make venv ALLOW_CUDA=1                      what pip finds, CUDA or not
#   make venv TORCH_INDEX=URL [ALLOW_CUDA=1]    from that index of torch wheels

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
ALLOW_CUDA ?=
TORCH_INDEX ?=
CPU_INDEX := https://download.pytorch.org/whl/cpu

export PIP_DISABLE_PIP_VERSION_CHECK := 1

RUN := $(VENV)/bin/python
# BenchMARL allows no TorchRL as new as ours: an environment and constraints of its own.
BENCHMARL := .venv-benchmarl
INSTALL := $(RUN) -m pip install -c constraints.txt $(if $(ALLOW_CUDA),,-c constraints-cpu.txt)
# Two torch workers with many threads each are slower than two with one.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: venv demo test test-slow test-benchmarl lint bench docs notebooks mutate clean
.NOTPARALLEL:

venv: $(VENV)/.installed

demo: $(VENV)/.installed-demo
	$(RUN) -m composite_losses.demo $(ARGS)

test: $(VENV)/.installed-test
	$(ONE_THREAD) $(RUN) -m pytest -n $(JOBS) -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-test
	$(ONE_THREAD) $(RUN) -m pytest -n $(JOBS) -m slow $(ARGS)

test-benchmarl: $(BENCHMARL)/.ready
	$(ONE_THREAD) $(BENCHMARL)/bin/python -m pytest -p tests.benchmarl.older -n $(JOBS) \
	  -m "not slow" $(or $(ARGS),$(addprefix tests/,benchmarl losses cases heads functional))

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(VENV)/.installed-bench
	$(RUN) -m benchmarks $(or $(ARGS),losses --quick)

notebooks: $(VENV)/.installed-notebooks
	$(ONE_THREAD) $(RUN) notebooks/run.py $(ARGS)

docs: $(VENV)/.installed-docs
	$(RUN) docs/build.py build/docs

# In a copy, where results are kept: a second run goes on with what has changed.
mutate: $(VENV)/.installed-mutate
	mkdir -p build/mutate
	cd build/mutate && rm -rf composite_losses tests examples
	cp -r composite_losses tests examples pyproject.toml LICENSE README.md build/mutate
	cd build/mutate && $(ONE_THREAD) $(abspath $(RUN)) -m mutmut run --max-children $(JOBS) $(ARGS)
	cd build/mutate && $(abspath $(RUN)) -m mutmut results | grep -v 'not checked' || true

clean:
	rm -rf $(VENV) $(BENCHMARL) build *.egg-info .mypy_cache .pytest_cache .ruff_cache

# Set-up. Each step leaves a stamp, so it is done once.

# torch comes first and alone: a range in another package must not choose its build.
$(VENV)/.torch: constraints.txt constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
ifneq ($(TORCH_INDEX),)
	$(INSTALL) --no-deps --index-url $(TORCH_INDEX) torch
else ifeq ($(ALLOW_CUDA),)
	$(INSTALL) torch || { \
	  echo "pip found no CPU build of torch: trying $(CPU_INDEX)"; \
	  echo "(TORCH_INDEX=URL names another index, ALLOW_CUDA=1 takes a CUDA build)"; \
	  $(INSTALL) --no-deps --index-url $(CPU_INDEX) torch; }
endif
	$(INSTALL) torch
	$(if $(ALLOW_CUDA),,$(RUN) -W ignore -c "import sys, torch.version as v; \
	  sys.exit((v.cuda or v.hip) and 'this torch is a GPU build: set ALLOW_CUDA=1 to keep it')")
	touch $@

# setuptools is pinned and came with torch, so nothing else is fetched to build with.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(INSTALL) --no-build-isolation -e .
	touch $@

$(VENV)/.installed-%: $(VENV)/.torch pyproject.toml
	$(INSTALL) --no-build-isolation -e '.[$*]'
	touch $@

# torch as above. BenchMARL comes without what it asks for: torchvision and PyAV, for the videos in
# its logs, are not imported here, and beside a CPU build of torch pip takes the wrong torchvision.
$(BENCHMARL)/.ready: constraints.txt constraints-benchmarl.txt constraints-cpu.txt pyproject.toml
	$(MAKE) VENV=$(BENCHMARL) $(BENCHMARL)/.torch
	grep -Ev '^(torchrl|tensordict)==' constraints.txt > $(BENCHMARL)/constraints.txt
	$(BENCHMARL)/bin/python -m pip install -c $(BENCHMARL)/constraints.txt \
	  -c constraints-benchmarl.txt $(if $(ALLOW_CUDA),,-c constraints-cpu.txt) torch torchrl \
	  tensordict einops vmas hydra-core tqdm pytest pytest-timeout pytest-xdist hypothesis
	$(BENCHMARL)/bin/python -m pip install -c constraints-benchmarl.txt --no-deps \
	  --no-build-isolation benchmarl -e .
	touch $@
