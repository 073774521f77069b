# Each target sets up what it needs: `make test` and `make demo` are all that a fresh machine with
# Python >= 3.11, g++ and make has to run. PYTHON chooses the interpreter, VENV the environment.

PYTHON ?= python3
VENV ?= .venv
CMAKE_BUILD := build/ffi
WHEEL_TOOLS := build/wheel-tools
# Tests share out a machine's cores, but several processes would fight over a GPU's memory.
PYTEST_FLAGS ?= $(if $(shell command -v nvidia-smi),,-n auto)
DEMO_FLAGS ?=

# The emulator's small products in numpy: threads of several processes would fight over the cores.
export OPENBLAS_NUM_THREADS := 1

BIN := $(VENV)/bin
LIBRARY := fa4_jax/libfa4_jax.so
SOURCES := $(wildcard ffi/*.cc ffi/*.h) ffi/exports.map CMakeLists.txt
FORMATTED := $(wildcard ffi/*.cc ffi/*.h ffi/testing/*.cc ffi/testing/*.h tests/ffi/*.cc)

# Dependencies and all extras, from pyproject.toml; JAX with CUDA where there is an NVIDIA driver.
define REQUIREMENTS
import shutil, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for requirement in project["dependencies"] + sum(project["optional-dependencies"].values(), []):
    print(requirement)
if shutil.which("nvidia-smi"):
    print("jax[cuda12]")
endef
export REQUIREMENTS

.PHONY: test demo lint format wheel wheels kernels library emulated environment clean

test: lint library kernels
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# The demo compiles kernels only where a GPU runs them, and those alone.
demo: library
	$(BIN)/python -m kernels.build --arch here
	PYTHONPATH=. $(BIN)/python examples/train_lm.py $(DEMO_FLAGS)

lint: environment
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: environment
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(FORMATTED)

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
	$(PYTHON) -c "$$REQUIREMENTS" > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.txt
	touch $@

clean:
	rm -rf build dist fa4_jax/_cubins $(LIBRARY)
