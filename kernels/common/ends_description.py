"""What the kernels before and after a main backward kernel consist of: rows by all warps."""

from __future__ import annotations

from kernels.description import LANES, Description, Role, TensorMap, operand

_WARPS = 8
THREADS = _WARPS * LANES


def pre() -> Description:
    """The preprocessing kernel: rows of registers alone."""
    return Description((Role("rows", 0, _WARPS, "row statistics, dq_acc = 0"),), (), (), ())


def post(rows: int, map_rows: int, columns: int, span_bytes: int) -> Description:
    """The postprocessing kernel of dQ tiles of this size, stored `map_rows` rows at a time."""
    staging = operand("dq", (rows, columns), span_bytes, "a tile of dQ on its way")
    stored = TensorMap("dq", "dq", map_rows, columns, span_bytes, store=True)
    role = Role("rows", 0, _WARPS, "dQ from its accumulators")
    return Description((role,), (), (), (staging,), (stored,))
