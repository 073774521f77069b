#!/usr/bin/env bash
# The CPU tests that need no kernels, on the library that Bazel built. PYTHON names the interpreter.
set -euo pipefail
exec "${PYTHON:-python3}" -m pytest -p no:cacheprovider \
  tests --ignore=tests/build --ignore=tests/ffi/test_golden.py
