"""A launch that is wrong raises an error that says why before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels import emulator
from kernels.emulator import EmulationError, PtxError
from tests.emulator import programs

TEXT = programs.HEAD.format(threads=32) + "st.global.b32 [%rd1], %r1;" + programs.TAIL


def launch(ptx: str = TEXT, kernel: str = "test", **changes: Any) -> None:
    """A launch that is right except for what the test changes."""
    arguments: dict[str, Any] = {
        "grid": (1, 1, 1),
        "block": (32, 1, 1),
        "dynamic_smem": 1024,
        "params": [programs.ADDRESS.to_bytes(8, "little")],
        "memory": {programs.ADDRESS: np.zeros(64, np.uint32)},
    }
    emulator.launch(ptx, kernel, **(arguments | changes))


def test_good_launch() -> None:
    launch()


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        ("int main() {}", "not PTX"),
        (TEXT.replace("8.8", "7.0"), "version 7.0"),
        (TEXT.replace("sm_90a", "sm_80"), "sm_80"),
        (TEXT.replace("[%rd1], %r1", "[%rd1], ?"), "line 16"),
        (TEXT.replace("[%rd1], %r1", "[%rd1], %r301"), "line 16"),
        (TEXT.replace("ret;", "bra NOWHERE;"), "no label NOWHERE"),
        (TEXT.replace("mov.u32 %r1,", "mov.u64 %r1,"), "line 14"),
        (TEXT.replace("mov.u32 %r1, %tid.x", "add.s32 %r1, %r1"), "wrong operand count"),
        (
            TEXT.replace("ret;", "tcgen05.wait::ld.sync.aligned;"),
            "line 17: sm_90a has no tcgen05.wait::ld",
        ),
        (
            TEXT.replace("sm_90a", "sm_100a").replace("ret;", "wgmma.fence.sync.aligned;"),
            "sm_100a has no wgmma.fence",
        ),
    ],
)
def test_text(ptx: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        launch(ptx)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "other"}, "no kernel other; there are test"),
        ({"params": []}, "takes 1 parameters, 0 were given"),
        ({"params": [b"1234"]}, "takes 8 bytes, 4 were given"),
        ({"block": (64, 1, 1)}, "compiled for"),
        ({"grid": (0, 1, 1)}, "at least 1"),
        ({"dynamic_smem": 300_000}, "at most 232448"),
        ({"cluster": (2, 1, 1)}, "no multiple of"),
        ({"grid": (16, 1, 1), "cluster": (16, 1, 1)}, "1 to 8 CTAs"),
        ({"memory": {8: np.zeros(4, np.uint32)}}, "not aligned"),
        ({"memory": {16: bytearray(64), 64: bytearray(64)}}, "overlaps"),
    ],
)
def test_launch(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(**changes)


def test_read_only_memory_is_not_written() -> None:
    with pytest.raises(EmulationError, match=r"read-only.*warp 0, PTX line 16: st\.global"):
        launch(memory={programs.ADDRESS: bytes(256)})


def test_cluster_of_the_text() -> None:
    text = TEXT.replace(".reqntid", ".reqnctapercluster 2\n.explicitcluster\n.reqntid")
    launch(text, grid=(2, 1, 1), cluster=(2, 1, 1))
    with pytest.raises(ValueError, match="compiled for clusters"):
        launch(text, grid=(2, 1, 1))


def test_pointer_outside_the_memory() -> None:
    with pytest.raises(EmulationError, match=r"out-of-bounds.*lane 0, PTX line 16: st\.global"):
        launch(params=[(1 << 40).to_bytes(8, "little")])
