"""What the kernels before and after a main backward kernel consist of: all warps work on rows."""

from __future__ import annotations

from kernels.description import LANES, Description, Division, Role, TensorMap, operand

_WARPS = 8
THREADS = _WARPS * LANES


def pre(rows: int, columns: int, by_ticket: bool = False) -> Description:
    """Describes the preprocessing kernel, which needs no shared memory.

    dQ's tiles are rows x columns; by_ticket: a counter deals the main kernel's tiles.
    """
    role = Role("rows", 0, _WARPS, "row statistics, dq_acc = 0")
    return Description((role,), (), (), (), Division(rows, columns=columns, by_ticket=by_ticket))


def post(division: Division, map_rows: int, columns: int, span_bytes: int) -> Description:
    """Describes the postprocessing kernel, which stores `map_rows` rows of dQ at a time."""
    staging = operand("dq", (division.rows, columns), span_bytes, "a tile of dQ on its way")
    stored = TensorMap("dq", "dq", map_rows, columns, span_bytes, store=True)
    role = Role("rows", 0, _WARPS, "dQ from its accumulators")
    return Description((role,), (), (), (staging,), division, (stored,))
