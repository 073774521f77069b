"""The comparison of kernel folders: its table, its processes, what it refuses."""

from __future__ import annotations

import os
import pathlib

import pytest

from benchmarks import kernel_folders, shapes
from benchmarks.kernel_folders import Outcome
from fa4_jax import runtime


def test_a_row_says_how_much_faster_the_others_are():
    case = shapes.QUICK[0]
    outcomes = [Outcome(2e-6, "bits"), Outcome(1e-6, "bits"), Outcome(4e-6, "others")]
    expected = [case.id, "2.0", "2.000, same bits", "0.500, other bits"]
    assert kernel_folders.row(case, outcomes) == expected


def test_each_folder_has_its_own_process(tmp_path: pathlib.Path):
    """Here both run the default path, so that their results are the same."""
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        folder.mkdir()
        (folder / "manifest.json").write_text('{"kernels": []}')
    rows = kernel_folders.main([*map(str, folders), "--quick", "--only", "grid-d64-causal-*"])
    ((name, _, comparison),) = rows
    assert name == "grid-d64-causal-b2-s256"
    assert comparison.endswith(", same bits")
    for folder in folders:
        with kernel_folders.start(folder) as pool:
            assert pool.submit(os.getenv, runtime.KERNELS_VARIABLE).result() == str(folder)


def test_several_globs_and_the_deterministic_backward(tmp_path: pathlib.Path):
    (tmp_path / "manifest.json").write_text('{"kernels": []}')
    globs = ["grid-d64-causal-*", "grid-d64-dense-*"]
    options = ["--direction", "backward", "--deterministic", "--quick", "--only", *globs]
    rows = kernel_folders.main([str(tmp_path), *options])
    assert {name.split("-")[2] for name, _ in rows} == {"causal", "dense"}


def test_what_it_refuses(tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match=r"holds no manifest\.json"):
        kernel_folders.start(tmp_path)
    with pytest.raises(ValueError, match="take --direction backward"):
        kernel_folders.main([str(tmp_path), "--deterministic"])
    with pytest.raises(ValueError, match="'nothing'"):
        kernel_folders.main([str(tmp_path), "--only", "nothing"])
