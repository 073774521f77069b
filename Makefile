# Each target sets up what it needs: `make test` and `make demo` are all that a fresh machine with
# Python >= 3.11, g++ and make has to run. PYTHON chooses the interpreter, VENV the environment.

PYTHON ?= python3
VENV ?= .venv
CMAKE_BUILD := build/ffi
WHEEL_TOOLS := build/wheel-tools
# Tests share out a machine's cores, but several processes would fight over a GPU's memory.
PYTEST_FLAGS ?= $(if $(shell command -v nvidia-smi),,-n auto)
DEMO_FLAGS ?=
DEMO_OUTPUT ?= demo_output
MATRIX := oldest newest
JAX_oldest := 0.8.0
JAX_newest := 0.12.*
PYTHON_oldest ?= $(call runs,python3.11)
# JAX 0.12 needs Python >= 3.12.
PYTHON_newest ?= $(call runs,python3.14 python3.13 python3.12)
# The extras with packages that fa4_jax/integrations adapts, and those packages.
INTEGRATIONS := integrations levanter maxtext
PACKAGES_integrations := ejkernel equinox tokamax
PACKAGES_levanter := levanter
PACKAGES_maxtext := maxtext
PYTHON_packages ?= $(call runs,python3.12 python3.13)
# The first of these interpreters that starts; pyenv puts names on PATH that do not.
runs = $(firstword $(foreach name,$(1),$(shell $(name) -c 'print("$(name)")' 2>/dev/null)) $(lastword $(1)))

# The emulator's small products in numpy: threads of several processes would fight over the cores.
export OPENBLAS_NUM_THREADS := 1

BIN := $(VENV)/bin
LIBRARY := fa4_jax/libfa4_jax.so
SOURCES := $(wildcard ffi/*.cc ffi/*.h) ffi/exports.map CMakeLists.txt
FORMATTED := $(wildcard ffi/*.cc ffi/*.h ffi/testing/*.cc ffi/testing/*.h tests/ffi/*.cc)

# Dependencies and those of the extras that are its arguments, from pyproject.toml.
define REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = (project["optional-dependencies"][name] for name in sys.argv[1:])
print(*project["dependencies"], *sum(extras, []), sep="\n")
endef
export REQUIREMENTS

.PHONY: test cover proof demo lint lint-text lint-types lint-types-of-kernels format matrix integrations wheel wheels kernels sample library emulated environment clean

# Linters, a sample of the kernels, and of slow tests the cases that fit their budgets
# (tests/case_seconds.py), compiled without LLVM's optimisations (tests/conftest.py): 49 minutes of
# a core. `cover` builds all kernels and runs cases with every feature, on optimised code (an hour),
# `proof` runs every case.
test: library
	$(MAKE) --jobs 2 --output-sync=target lint sample
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

cover: lint library kernels
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --full-cover

proof: lint library kernels
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --every-case

# The demo compiles kernels only where a GPU runs them, and those alone.
demo: library
	$(BIN)/python -m kernels.build --arch here
	PYTHONPATH=. $(BIN)/python examples/train_lm.py --output $(DEMO_OUTPUT) $(DEMO_FLAGS)
	PYTHONPATH=. $(BIN)/python examples/generate.py --checkpoint $(DEMO_OUTPUT)/checkpoint

# Each linter uses one core, so `make --jobs` can run two of them, or one beside a build.
lint: lint-text lint-types lint-types-of-kernels

lint-text: environment
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

lint-types: environment
	$(BIN)/pyright --pythonpath $(BIN)/python

lint-types-of-kernels: environment
	$(BIN)/pyright --pythonpath $(BIN)/python --project kernels

format: environment
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(FORMATTED)

# The oldest and the newest JAX that are supported, on a CPU; `make -k` runs both if the first fails.
matrix: $(MATRIX:%=matrix-%)

$(MATRIX:%=matrix-%): matrix-%: build/matrix/%/.installed library kernels
	build/matrix/$*/bin/python -c 'import sys, jax; print("JAX", jax.__version__, sys.version)'
	JAX_PLATFORMS=cpu build/matrix/$*/bin/python -m pytest -n auto tests/unit tests/ffi

$(MATRIX:%=build/matrix/%/.installed): build/matrix/%/.installed: pyproject.toml
	$(PYTHON_$*) -m venv build/matrix/$*
	$(PYTHON_$*) -c "$$REQUIREMENTS" build flax test > build/matrix/$*/requirements.txt
	build/matrix/$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r build/matrix/$*/requirements.txt 'jax==$(JAX_$*)'
	touch $@

# The adapters against the packages themselves, in an environment for each extra, on a CPU.
integrations: $(INTEGRATIONS:%=integrations-%)

$(INTEGRATIONS:%=integrations-%): integrations-%: build/integrations/%/.installed library
	FA4_JAX_REQUIRED_PACKAGES='$(PACKAGES_$*)' JAX_PLATFORMS=cpu \
	  build/integrations/$*/bin/python -m pytest \
	  $(PACKAGES_$*:%=tests/integrations/test_%.py) tests/integrations/test_docs.py

$(INTEGRATIONS:%=build/integrations/%/.installed): build/integrations/%/.installed: pyproject.toml
	$(PYTHON_packages) -m venv build/integrations/$*
	$(PYTHON_packages) -c "$$REQUIREMENTS" $* > build/integrations/$*/requirements.txt
	build/integrations/$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r build/integrations/$*/requirements.txt 'pytest>=8'
	touch $@

# dist/ gets a wheel for x86_64 and one for aarch64, or with `wheel` this machine's alone.
wheel: PROCESSORS := $(shell uname -m)
wheel wheels: kernels $(WHEEL_TOOLS)/.installed
	$(WHEEL_TOOLS)/bin/python -m kernels.build.wheels $(PROCESSORS)

# An environment of its own: the cross compiler alone takes 400 MB. Groups need pip 25.1.
$(WHEEL_TOOLS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(WHEEL_TOOLS)/bin/python -m pip install --quiet --group wheels
	touch $@

kernels: environment
	$(BIN)/python -m kernels.build

# What the tests of `make test` look at, and all that no record speaks of; kernels/build/sample.py.
sample: environment
	$(BIN)/python -m kernels.build --sample

library: $(LIBRARY)

$(LIBRARY): $(SOURCES) | environment
	$(BIN)/cmake -S . -B $(CMAKE_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DFA4_JAX_XLA_INCLUDE=$$($(BIN)/python ffi/xla_headers.py build/headers)
	$(BIN)/cmake --build $(CMAKE_BUILD)
	$(BIN)/cmake --install $(CMAKE_BUILD) --prefix .
	touch $@

# A GPU on the CPU: kernels/emulator/README.md says how to use what this leaves in build/emulated.
emulated: library kernels
	$(BIN)/cmake --build $(CMAKE_BUILD) --target emulated_cuda
	$(BIN)/python -m kernels.build --ptx build/emulated
	cp $(CMAKE_BUILD)/libemulated_cuda.so build/emulated

environment: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) -c "$$REQUIREMENTS" build dev flax test > $(VENV)/requirements.txt
	$(if $(shell command -v nvidia-smi),echo 'jax[cuda12]' >> $(VENV)/requirements.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.txt
	touch $@

clean:
	rm -rf build dist fa4_jax/_cubins $(LIBRARY)
