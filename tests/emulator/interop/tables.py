"""What runs give, as rows of Markdown tables: pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from kernels.emulator.report import Report

ROLES = {
    "softmax": tuple(range(8)),
    "correction": tuple(range(8, 12)),
    "mma": (12,),
    "store": (13,),
    "load": (14,),
    "spare": (15,),
}
"""Warps of flash-attn-4's Blackwell forward with two tiles of queries."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """Instructions of one warp of a role for one block of keys.

    Attributes:
      classes: by class, most first.
    """

    role: str
    total: float
    classes: dict[str, float]


def per_block(
    short: Report, long: Report, blocks: int, roles: Mapping[str, Sequence[int]]
) -> list[Counted]:
    """What `blocks` more blocks of keys cost a warp of each role, for one block.

    Both launches are alike but for that; what happens once cancels.
    """
    counted = []
    for name, warps in roles.items():
        per = blocks * len(warps)
        low, high = short.by_role(), long.by_role()
        classes = {
            kind: (count - low[name].classes.get(kind, 0)) / per
            for kind, count in high[name].classes.items()
        }
        ordered = sorted((kind for kind in classes if classes[kind]), key=lambda k: -classes[k])
        total = (high[name].instructions - low[name].instructions) / per
        counted.append(Counted(name, total, {kind: classes[kind] for kind in ordered}))
    return counted


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers are written as they are given."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def tflops(flops: float, cycles: float, clock_ghz: float, multiprocessors: int) -> float:
    """TFLOP/s of a GPU, each of whose SMs needs `cycles` for its `flops`."""
    return flops / cycles * clock_ghz * multiprocessors / 1e3


def mean_of_line(points: Sequence[tuple[float, float]], first: int, last: int) -> float:
    """Mean over whole numbers from `first` to `last` of the line through two points."""
    (x0, y0), (x1, y1) = points
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * ((first + last) / 2 - x0)
