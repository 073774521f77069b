"""Compiles the C++ parts of these tests."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).absolute().parents[2]


def object_file(output: pathlib.Path, source: pathlib.Path) -> None:
    """Compiles one C++ source."""
    _run("-c", "-o", str(output), str(source))


def shared_library(output: pathlib.Path, *inputs: pathlib.Path) -> None:
    """Builds a shared library from C++ sources and objects."""
    _run("-shared", "-o", str(output), *map(str, inputs))


def library_of_object(output: pathlib.Path, code: pathlib.Path) -> None:
    """Builds a shared library of one object, whose undefined names come from those loaded before.

    Without the C++ library it takes a tenth of the time.
    """
    _run("-nostdlib", "-shared", "-o", str(output), str(code))


def executable(output: pathlib.Path, source: pathlib.Path, flags: Sequence[str]) -> None:
    """Builds a program from one C++ source."""
    _run(*flags, "-o", str(output), str(source))


def _run(*arguments: str) -> None:
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC"]
    command += ["-Wall", "-Wextra", "-Werror", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
