"""An unknown setting of the emulated GPU is named wherever somebody asks for a kernel."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from fa4_jax import manifest, runtime
from kernels.emulator.driver.driver import SETTINGS_VARIABLE
from tests.fakes import fake_manifest
from tests.ffi import compiler

SCRIPT = """
import jax.numpy as jnp
import fa4_jax
from fa4_jax import __main__ as command
x = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
command.main(["doctor"])
fa4_jax.attention(x, x, x, implementation="kernel")
"""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sede=3", "'sede=3': no such setting; there are capability, multiprocessors, seed"),
        ("capability=8.9", "'capability=8.9': one of 9.0, 10.0"),
    ],
)
def test_a_setting_that_there_is_not(setting: str, message: str, tmp_path: pathlib.Path):
    if not runtime.register():
        pytest.fail(f"these tests need the FFI library: {runtime.why_unavailable()}")
    library = tmp_path / "libemulated_cuda.so"
    compiler.shared_library(library, compiler.ROOT / "ffi" / "testing" / "emulated_cuda.cc")
    (tmp_path / "manifest.json").write_text(manifest.dump(fake_manifest()))
    variables = {
        runtime.STAND_IN_VARIABLE: str(library),
        runtime.KERNELS_VARIABLE: str(tmp_path),
        SETTINGS_VARIABLE: setting,
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | variables,
        cwd=compiler.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{SETTINGS_VARIABLE}: {message}" in done.stdout  # the doctor's
    assert done.stderr.splitlines()[-1].startswith("NotImplementedError: implementation='kernel': ")
    assert f"{SETTINGS_VARIABLE}: {message}" in done.stderr.splitlines()[-1]
