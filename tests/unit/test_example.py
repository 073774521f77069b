"""Runs the examples that train and that sample, at toy size, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOY = "--layers 1 --width 32 --heads 1 --length 64 --batch 16 --steps 80 --learning-rate 1e-2"


def run(output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the training on two virtual CPU devices."""
    return run_example("examples/train_lm.py", "--output", str(output), *flags)


def run_example(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs an example on two virtual CPU devices."""
    flags = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=2"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": " ".join(flags),
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
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
    check_samples(tmp_path / "shared" / "checkpoint")


def check_samples(checkpoint: Path) -> None:
    """Samples the likeliest bytes from a checkpoint: the same in pages of any size."""
    flags = "--checkpoint", str(checkpoint), "--temperature", "0", "--bytes", "40"
    texts = []
    for page_size in ("16", "7"):
        done = run_example("examples/generate.py", *flags, "--page-size", page_size)
        assert done.returncode == 0, done.stderr
        text, speed = done.stdout.rsplit("\n", 2)[:2]
        assert re.match(r"160 bytes of 4 prompts in .* tokens/s on cpu", speed)
        texts.append(text)
    assert texts[0] == texts[1]
    alone = run_example("examples/generate.py", *flags, "--prompt", "import ")
    (own,) = re.findall(r"--- 'import '\n(.*?)\n---", texts[0], re.DOTALL)
    assert own in alone.stdout


def test_sampling_needs_a_checkpoint(tmp_path):
    refused = run_example("examples/generate.py", "--checkpoint", str(tmp_path / "absent"))
    assert refused.returncode == 2
    assert "absent: not there; run examples/train_lm.py" in refused.stderr


def test_wrong_meshes_are_refused(tmp_path):
    for mesh, reason in (("model=2", "write sizes of"), ("data=3", "there are 2 devices")):
        refused = run(tmp_path, "--mesh", mesh)
        assert refused.returncode == 2
        assert f"--mesh {mesh}: {reason}" in refused.stderr


@pytest.mark.slow
def test_meanflow_tells_what_has_not_learned(tmp_path):
    flags = ["--steps", "3", "--batch", "4", "--width", "32", "--layers", "1", "--output"]
    found = run_example("examples/meanflow.py", *flags, str(tmp_path))
    assert found.returncode == 1, found.stderr
    distances = re.search(r"nearest ring: ([\d.]+), after training ([\d.]+)", found.stdout)
    assert distances is not None, found.stdout + found.stderr
    before, after = map(float, distances.groups())
    assert after > 0.6 * before
    assert (tmp_path / "samples.png").stat().st_size > 1000
