"""The committed pictures of the kernels' pipelines are those that the kernels give."""

from __future__ import annotations

import pytest

from kernels.emulator.timing.rates import HOPPER
from kernels.emulator.timing.replay import Timing
from kernels.emulator.timing.resources import Interval
from kernels.emulator.timing.timeline import svg
from tests.emulator.pipelines import PICTURES, Picture


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.key.name)
def test_picture_is_current(picture: Picture) -> None:
    if picture.path.read_text() != picture.drawn():
        pytest.fail(f"{picture.path.name} is old: run python -m tests.emulator.pipelines")


def test_a_picture_has_rows_for_roles_and_units_and_names_of_long_waits() -> None:
    intervals = (
        Interval("CTA 0 warp  0", "runs", 0, 100),
        Interval("CTA 0 warp  0", "waits: q_full", 100, 900),
        Interval("CTA 0 warp  0", "waits: k_full", 950, 951),
        Interval("CTA 0 warp  1", "waits: unseen", 0, 900),
        Interval("CTA 0 warp  2", "waits: idling", 0, 900),
        Interval("tensor core 0", "warp 0", 0, 50),
        Interval("tensor core 1", "warp 1", 0, 50),
    )
    text = svg(Timing(1000, {}, {}, intervals, HOPPER), "title", {"mma": (0, 1), "idle": (2,)})
    assert [name for name in ("q_full", "mma", "tensor core") if f">{name}<" not in text] == []
    assert [name for name in ("k_full", "unseen", "idl", "core 1") if name in text] == []
