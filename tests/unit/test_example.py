"""Runs the training example, at toy size, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TOY = "--layers 1 --width 32 --heads 1 --length 64 --batch 16 --steps 80 --learning-rate 1e-2"


def run(output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the example on two virtual CPU devices."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "examples/train_lm.py", "--output", str(output), *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def held_out_loss(text: str) -> float:
    found = re.search(r"held-out loss: ([\d.]+) nats/byte", text)
    assert found is not None, text
    return float(found.group(1))


def test_one_device_and_two_learn_the_same(tmp_path):
    alone = run(tmp_path / "alone", *TOY.split(), "--implementation", "xla")
    assert alone.returncode == 0, alone.stderr
    assert "1 x cpu" in alone.stdout
    assert "attention ran on: pure-JAX default (implementation='xla')" in alone.stdout
    assert "attention gradients: at most" in alone.stdout
    assert "tokens/s" in alone.stderr
    assert (tmp_path / "alone" / "loss.png").stat().st_size > 1000

    shared = run(tmp_path / "shared", *TOY.split(), "--mesh", "data=2")
    assert shared.returncode == 0, shared.stderr
    assert "2 x cpu" in shared.stdout
    assert abs(held_out_loss(shared.stdout) - held_out_loss(alone.stdout)) < 0.02


def test_wrong_meshes_are_refused(tmp_path):
    for mesh, reason in (("model=2", "write sizes of"), ("data=3", "there are 2 devices")):
        refused = run(tmp_path, "--mesh", mesh)
        assert refused.returncode == 2
        assert f"--mesh {mesh}: {reason}" in refused.stderr
