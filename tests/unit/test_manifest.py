"""A manifest that cannot be used stops neither the import nor the default path, and is named."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from fa4_jax import catalogue, manifest
from tests.fakes import fake_manifest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHOLE = manifest.dump(fake_manifest(catalogue.all_keys()[:2]))

SCRIPT = """
import jax.numpy as jnp
import fa4_jax
from fa4_jax import __main__ as command
x = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
assert fa4_jax.attention(x, x, x).shape == x.shape
for options in ({}, {"arch": "sm_90a"}):
    try:
        fa4_jax.attention(x, x, x, implementation="kernel", **options)
    except NotImplementedError as error:
        print("kernel:", error)
print("status", command.main(["doctor"]))
"""


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(WHOLE) | changes)


def record(**changes: Any) -> str:
    document = json.loads(WHOLE)
    document["kernels"][0] |= changes
    return json.dumps(document)


BAD = {
    "truncated": (WHOLE[: len(WHOLE) // 2], "is damaged: "),
    "empty": ("", "is damaged: "),
    "other version": (changed(schema=99), "manifest schema 99, this library reads 1"),
    "not text": (b"\xff\xfe\x00", "is damaged: "),
    "a list": ("[]", "is damaged: it names no schema"),
    "no kernels": ('{"schema": 1}', "is damaged: it lists no kernels"),
    "no launch": (record(launch={}), "is damaged: a record has a wrong or no 'operands'"),
    "no record": (changed(kernels=[3]), "is damaged: a record"),
    "no such pass": (record(key={"kernel": "sideways"}), "is damaged: a record"),
    "a folder": (None, "cannot be read: Is a directory"),
}


def write(directory: pathlib.Path, content: str | bytes | None) -> pathlib.Path:
    path = directory / "manifest.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str, tmp_path: pathlib.Path):
    content, message = BAD[name]
    path = write(tmp_path, content)
    with pytest.raises(ValueError) as error:
        manifest.load(path)
    assert str(path) in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("name", ["truncated", "other version", "no launch", "a folder"])
def test_the_default_path_runs_and_doctor_names_the_file(name: str, tmp_path: pathlib.Path):
    content, message = BAD[name]
    path = write(tmp_path, content)
    environment = dict(os.environ, FA4_JAX_KERNELS=str(tmp_path))
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    problem = next(line for line in lines if line.startswith("PROBLEM"))
    assert str(path) in problem and message in problem
    # The named architecture needs no library, so its error is always about the manifest.
    assert any(str(path) in line and message in line for line in lines if "kernel:" in line)
    assert lines[-1] == "status 1"
