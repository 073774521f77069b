"""Where the rows of matrices lie that ldmatrix loads from a swizzled tile of shared memory.

A tile, of 64 rows where nothing else is said, lies span by span; a chunk of 16 bytes of row r of a
span lies where the chunk number chunk ^ (r // rows of 128 bytes) has without swizzle.
"""

import cutlass.cute as cute
from cutlass import Int32

ROWS = 64


def lane_addresses(
    by_columns: tuple[cute.Tensor, ...], by_rows: tuple[cute.Tensor, ...], span_bytes: int
) -> list[Int32]:
    """Returns the address of this lane's row of 16 rows and 16 columns, four matrices, of tiles.

    Of the four matrices the first two are 16 columns of the first eight rows in `by_columns`: two
    operands B of mma.sync, of eight rows each. In `by_rows` they are 16 rows of the first eight
    columns: operand A, or transposed two B.
    """
    lane = cute.arch.lane_idx()
    row, low, high = lane % 8, (lane // 8) % 2, lane // 16
    chunks = span_bytes // 16
    turn = (row // (8 // chunks)) % chunks
    found = []
    of_columns = [(tile, high, low) for tile in by_columns]
    for tile, row_bit, chunk_bit in (*of_columns, *((tile, low, high) for tile in by_rows)):
        start = tile.iterator.toint().to(Int32) + (8 * row_bit + row) * span_bytes
        found.append(start + (chunk_bit ^ turn) * 16)
    return found


def place(row: int, column: int, span_bytes: int, rows: int = ROWS) -> tuple[int, int]:
    """Returns of 16 rows and 16 columns what changes bits of their address, and the offset.

    rows: of the tile.
    """
    columns = span_bytes // 2
    offset = column // columns * (rows * span_bytes) + row * span_bytes
    return 2 * (column % columns), offset


def row_place(row: int, span_bytes: int) -> tuple[int, int]:
    """Returns of an even row what changes bits of the address of a chunk in row 0 or 1, and the
    offset.
    """
    chunks = span_bytes // 16
    return row // (8 // chunks) % chunks * 16, row * span_bytes
