"""What the kernels before and after a main backward kernel consist of: all warps work on rows."""

from __future__ import annotations

from kernels.description import LANES, Description, Division, Role, TensorMap, operand

_WARPS = 8
THREADS = _WARPS * LANES


def pre(division: Division) -> Description:
    """Describes the preprocessing kernel, which needs no shared memory.

    division: as the main kernel's, but for CTAs that take tile after tile.
    """
    role = Role("rows", 0, _WARPS, "row statistics, dq_acc = 0")
    return Description((role,), (), (), (), division)


def post(division: Division, map_rows: int, columns: int, span_bytes: int) -> Description:
    """Describes the postprocessing kernel, which stores `map_rows` rows of dQ at a time."""
    staging = operand("dq", (division.rows, columns), span_bytes, "a tile of dQ on its way")
    stored = TensorMap("dq", "dq", map_rows, columns, span_bytes, store=True)
    role = Role("rows", 0, _WARPS, "dQ from its accumulators")
    return Description((role,), (), (), (staging,), division, (stored,))
