"""The parts of the comparison with kernels of others that do not need their package."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from kernels.emulator import Report
from tests.emulator.interop import host_code, run, tables
from tests.emulator.interop.host_code import Tensor
from tests.emulator.interop.run import Problem


def test_arguments_of_the_host_code() -> None:
    """Pointer, 32-bit sizes, 64-bit strides without the last one, naturally aligned."""
    array = np.zeros((2, 3, 5, 8), np.float16)
    packed = bytes(host_code.argument(Tensor.of(0x1234567890, array)))
    assert packed[:8] == (0x1234567890).to_bytes(8, "little")
    assert np.frombuffer(packed[8:24], np.int32).tolist() == [2, 3, 5, 8]
    assert np.frombuffer(packed[24:], np.int64).tolist() == [120, 40, 8]
    rows = bytes(host_code.argument(Tensor.of(16, np.zeros((4, 3, 7), np.float32))))
    assert np.frombuffer(rows[8:20], np.int32).tolist() == [4, 3, 7]
    assert np.frombuffer(rows[24:], np.int64).tolist() == [21, 7]
    assert len(bytes(host_code.argument(Tensor.of(16, np.zeros(9, np.float32))))) == 16
    with pytest.raises(ValueError, match="contiguous"):
        host_code.argument(Tensor.of(16, array[..., ::2]))


def test_scalars_of_the_host_code() -> None:
    assert isinstance(host_code.argument(0.5), ctypes.c_float)
    assert isinstance(host_code.argument(3), ctypes.c_int32)
    assert host_code.argument(None).value is None


def test_places_are_apart() -> None:
    arrays = {"a": np.zeros((1 << 20, 2), np.uint8), "b": np.ones((3, 4), np.float32)}
    tensors, memory = run.place(arrays)
    starts = sorted(memory)
    assert [t.address for t in tensors.values()] == starts
    assert starts[1] - starts[0] > arrays["a"].nbytes
    memory[tensors["b"].address][:4] = 0
    assert arrays["b"][0, 0] == 0


def test_relative_error() -> None:
    wanted = np.array([3.0, 4.0, -np.inf])
    assert run.relative_error(wanted, wanted) == 0
    assert run.relative_error(np.array([3.0, 4.5, -np.inf]), wanted) == pytest.approx(0.1)
    assert run.relative_error(np.array([3.0, 4.0, 0.0]), wanted) == np.inf
    assert run.relative_error(np.array([3.0, np.nan, -np.inf]), wanted) == np.inf


def test_growing_inputs_move_the_maximum() -> None:
    problem = Problem(64, 512, growing=True)
    inputs = run.make_inputs(problem, 64, 32)
    assert inputs.value.shape == (1, 512, 1, 32)
    scores = inputs.query[0, :, 0].astype(np.float64) @ inputs.key[0, :, 0].astype(np.float64).T / 8
    tops = scores.reshape(64, 4, 128).max(-1)
    assert (tops[:, 3] > tops[:, 0] + 8).all()
    results = run.expected(problem, inputs, is_causal=True)
    assert results["output"].shape == (1, 64, 1, 32)
    np.testing.assert_allclose(
        results["lse"][0, 0, 63], np.log(np.exp(scores[63]).sum()), rtol=1e-6
    )


def report(*warps: dict[str, int]) -> Report:
    empty = tuple(Counter[str]() for _ in warps)
    counters = tuple(Counter(warp) for warp in warps)
    kinds = {
        "mov.b32": "move",
        "ex2.f32": "special",
        "bar.sync": "wait",
        "add.f32": "floating point",
    }
    roles, grid = {"x": (0, 1), "y": (2,)}, (1, 1, 1)
    return Report("k", grid, roles, kinds, counters, empty, frozenset(), 0, 0, 0.0)


def test_counts_per_block() -> None:
    """What both launches do alike cancels; warps of a role are averaged."""
    short = report({"mov.b32": 5, "ex2.f32": 4}, {"mov.b32": 5}, {"bar.sync": 7})
    long = report({"mov.b32": 25, "ex2.f32": 4}, {"mov.b32": 15, "add.f32": 40}, {"bar.sync": 7})
    counted = tables.per_block(short, long, 5, {"x": (0, 1), "y": (2,)})
    assert [dataclasses.astuple(c) for c in counted] == [
        ("x", 7.0, {"floating point": 4.0, "move": 3.0}),
        ("y", 0.0, {}),
    ]


def test_tables() -> None:
    assert tables.markdown(("a", "b"), [(1, "x")]) == "| a | b |\n| --- | --- |\n| 1 | x |"
    assert tables.mean_of_line(((2, 10), (4, 20)), 1, 5) == 15
    assert tables.tflops(8192, 1, 1.85, 148) == pytest.approx(2242.97, abs=0.01)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_stand_in_for_torch() -> None:
    """Runs in a process of its own, since the stand-in stays for the whole process."""
    script = """
from tests.emulator.interop import torch_stand_in
assert torch_stand_in.install()
import torch
from torch._subclasses.fake_tensor import FakeTensor
kinds = {torch.float16: 1, torch.bfloat16: 2}
assert len(kinds) == 2 and kinds[torch.float16] == 1
def f(x: torch.Tensor | None, y: int | torch.Tensor = 1) -> torch.Tensor: return x
assert torch.library.custom_op(f) is f
class Function(torch.autograd.Function): pass
assert isinstance(FakeTensor, type)
try:
    torch.__version__
except AttributeError:
    print("fine")
"""
    blocked = f"import sys\nsys.path[:] = {[p for p in sys.path if p]!r}\n" + script
    done = subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, check=False
    )
    assert done.stdout == "fine\n", done.stderr
