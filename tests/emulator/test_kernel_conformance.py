"""The order of the runs of kernel_conformance, and texts from a folder."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib

import pytest

from fa4_jax.key import KernelKey, Pass
from kernels.build import cache, package
from tests.emulator import attention, kernel_conformance
from tests.emulator.kernel_conformance import Run

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

KEY = KernelKey("sm_90a", Pass.FORWARD, "bf16", 64)


def test_runs_of_a_problem_stay_together() -> None:
    runs = [
        Run(case, key, seed)
        for seed in range(20)
        for case, key in kernel_conformance.covering(seed)
        if key.kernel is Pass.FORWARD and key.head_dim == 64 and key.arch == "sm_90a"
    ]
    parts = kernel_conformance.by_problem(runs)
    assert sorted(run.name + str(run.seed) for part in parts for run in part) == sorted(
        run.name + str(run.seed) for run in runs
    )
    assert all(len({run.problem for run in part}) == 1 for part in parts)
    assert max(map(len, parts)) > 1
    firsts = [part[0].seed for part in parts]
    assert firsts == sorted(firsts)


def test_texts_of_a_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = cache.find(KEY)
    if entry is None:
        pytest.skip(f"{KEY.name} is not built")
    package.package_ptx([dataclasses.replace(entry, ptx=entry.ptx + "// read\n")], tmp_path)
    monkeypatch.setattr(attention, "_read", {})
    attention.read_ptx(tmp_path)
    read = attention.ptx.__wrapped__(KEY)
    assert read.text == entry.ptx + "// read\n"
    assert (read.symbol, read.launch) == (entry.cubin.symbol, entry.cubin.launch)
