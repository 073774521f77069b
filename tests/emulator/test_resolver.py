"""A forked process that has masks resolved by a process of its own comes to its end."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
import multiprocessing
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.plan import kernel_keys
from tests.emulator import attention

def resolve():
    case = Case(batch=1, heads=(1, 1), query_length=9, key_length=9, masks=("segments",))
    keys, _ = kernel_keys(case.problem, "sm_90a")
    assert "row_low" in attention._forward_buffers(case, make_inputs(case, 0), keys)

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=resolve)
    process.start()
    process.join(60)
    ended = process.exitcode
    process.kill()
    raise SystemExit(0 if ended == 0 else f"it ended with {ended}")
"""


def test_a_forked_process_ends_after_masks_were_resolved(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
