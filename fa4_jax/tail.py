"""How many of a backward's last key tiles may be split among CTAs, which leaves none idle.

The kernel decides how many it splits, since it knows the number of multiprocessors; the buffers
in which parts meet have room for as many as may be (kernels/sm90/backward_tail.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from fa4_jax.manifest import Launch, evaluate_size

Shape = tuple[int, int, int]

MOST_TILES = 64
"""More have no two multiprocessors each on an H200, which has 132."""


def shape(launches: Sequence[Launch], shapes: dict[str, tuple[int, ...]]) -> Shape | None:
    """Shape (room, tiles, 0) of the operand `tail` of a backward, if it has that.

    Args:
      launches: of the backward, in order.
      shapes: of a call's buffers.
    """
    before, main, *_ = launches
    if "tail" not in before.operands:
        return None
    if "tail_acc" not in main.operands:
        return 0, 0, 0
    tiles = evaluate_size(main.grid[0], shapes) // main.grid[0][0].multiple
    # A symbolic number of tiles has no smaller one.
    return (min(tiles, MOST_TILES) if isinstance(tiles, int) else MOST_TILES), tiles, 0
