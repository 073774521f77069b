"""Where the rows of matrices lie that ldmatrix loads from a swizzled tile of shared memory.

A tile of 64 rows lies span by span; a chunk of 16 bytes of row r of a span lies where the chunk
number chunk ^ (r // rows of 128 bytes) has without swizzle.
"""

import cutlass.cute as cute
from cutlass import Int32

ROWS = 64


def lane_address(tile: cute.Tensor, span_bytes: int, rows_first: bool) -> Int32:
    """Returns the address of this lane's row of 16 rows and 16 columns: four matrices.

    Of the four matrices the first two are 16 rows of the first eight columns, if rows_first: then
    they are operand A of mma.sync, or transposed two B. Otherwise they are 16 columns of the first
    eight rows: two operands B, of eight rows each.
    """
    lane = cute.arch.lane_idx()
    row, low, high = lane % 8, (lane // 8) % 2, lane // 16
    row_bit, chunk_bit = (low, high) if rows_first else (high, low)
    chunks = span_bytes // 16
    turn = (row // (8 // chunks)) % chunks
    start = tile.iterator.toint().to(Int32) + (8 * row_bit + row) * span_bytes
    return start + (chunk_bit ^ turn) * 16


def place(row: int, column: int, span_bytes: int) -> tuple[int, int]:
    """Returns of 16 rows and 16 columns what changes bits of their address, and the offset."""
    columns = span_bytes // 2
    offset = column // columns * (ROWS * span_bytes) + row * span_bytes
    return 2 * (column % columns), offset
