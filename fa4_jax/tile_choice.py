"""Which of its tiles of query rows a forward takes: the one with which the launch ends first.

A tall tile computes a pair of query and key in less time: more rows share a load, and a third
warpgroup hides more of the others' softmax. Short tiles leave out more of what a band hides, and
there are more of them, so that they fill the multiprocessors better where heads are few: 88 tiles
of one wave take as long as 132. At d = 128, 8 heads and 2048 rows, 128 short tiles take 0.78 of the
time of 88 tall ones (docs/hopper.md).

The choice depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fa4_jax import designs, splits
from fa4_jax.key import DENSE_TILES, NARROW_TILES, SHORT_TILES, WARPGROUP_ROWS, ShortTile
from fa4_jax.problem import Problem

TIME_SHARES = {("sm_90a", 64): 0.77, ("sm_90a", 96): 0.73, ("sm_90a", 128): 0.69}
"""By (arch, head_dim): the time of a short tile over that of a tall one, as it fits whole calls on
an H200; tiles alone were not timed."""

LONE_SHARE = 0.5
"""The time of a last tall tile of `DENSE_TILES` in which one warpgroup alone has rows, over that of
a full one, as it fits whole calls (docs/hopper-power.md); warpgroups without rows do nothing."""

LEAST_TILES = 33
"""A launch of fewer tall tiles is chosen by the sum of the work, as if they ran one by one. Calls
with 24 took 10 to 22 us, and neither tile was the faster one in all of them; and problems as small
as those of tests then run on both."""

_BLOCK_KEYS = 128
"""A tile's time is that of the blocks of keys that its rows see."""


End = Callable[[Problem, int, int], float]
"""Of a problem, a tile's query rows and a number of multiprocessors: when the last tile ends."""


def takes_short(
    problem: Problem, of: tuple[str, int], has_ranges: bool, design: str | None
) -> bool:
    """Whether a forward takes the tile of fewer query rows, `KernelKey.short`.

    Args:
      of: the architecture and the head dim's tile.
      has_ranges: whether its kernel is one with ranges, or with sinks.
      design: one of `designs.TILES` if that is asked for.
    """
    short = SHORT_TILES.get(of)
    if short is None:
        return False
    if problem.has_soft_cap or problem.has_mask or problem.bias is not None:
        return True
    return (has_ranges and short.takes_ranges) or _prefers(problem, of, short, design, _band_end)


def takes_tile_of_band(problem: Problem, of: tuple[str, int], design: str | None) -> bool:
    """Whether a dense forward takes the tile of a band (`DENSE_TILES`); `of`, `design` as above."""
    short = DENSE_TILES.get(of)
    return short is not None and _prefers(problem, of, short, design, _dense_end)


def takes_narrow(problem: Problem, of: tuple[str, int]) -> bool:
    """Whether a forward takes the tile of `KernelKey.narrow`."""
    most_keys = NARROW_TILES.get(of)
    if most_keys is None or not problem.band or problem.bias is not None:
        return False
    return not (problem.has_soft_cap or problem.has_mask) and _mean_keys(problem) <= most_keys


def last_end(tile_keys: Sequence[int], heads: int, multiprocessors: int) -> float:
    """Returns when the last tile ends, at the earliest, in keys, if longer tiles start first.

    The multiprocessors have at least the mean of the work. And of the k n + 1 longest tiles of n
    multiprocessors one has k + 1, all of which are as long as the last of these or longer.

    Args:
      tile_keys: keys that each tile of a head computes.
      heads: how many there are, of all batch elements.
    """
    longest_first = sorted(tile_keys, reverse=True)
    tiles = heads * len(tile_keys)
    ends = [
        (before + 1) * longest_first[before * multiprocessors // heads]
        for before in range(-(-tiles // multiprocessors))
    ]
    return max(heads * sum(tile_keys) / multiprocessors, *ends)


def _prefers(
    problem: Problem, of: tuple[str, int], short: ShortTile, design: str | None, end: End
) -> bool:
    """Whether a launch of short tiles is asked for, or else ends before one of tall ones."""
    if design in designs.TILES:
        return design == designs.SHORT
    sizes = (problem.batch, problem.query_heads, problem.query_length, problem.key_length)
    if not all(isinstance(size, int) for size in sizes) or 0 in sizes:
        return False  # Of symbolic sizes nothing is known.
    has_few = _heads(problem) * -(-problem.query_length // short.tall_rows) < LEAST_TILES
    multiprocessors = 1 if has_few else splits.MULTIPROCESSORS[of[0]]
    short_end, tall_end = (end(problem, x, multiprocessors) for x in (short.rows, short.tall_rows))
    return TIME_SHARES[of] * short_end < tall_end


def _heads(problem: Problem) -> int:
    """Heads of all batch elements: each has tiles of its own."""
    return problem.batch * problem.query_heads


def _band_end(problem: Problem, rows: int, multiprocessors: int) -> float:
    """When the last tile ends, in keys, where tickets deal the tiles, or all are equal."""
    return last_end(_tile_keys(problem, rows), _heads(problem), multiprocessors)


def _dense_end(problem: Problem, rows: int, multiprocessors: int) -> float:
    """When the last tile ends, in tiles, where each multiprocessor has as many, or one less.

    A head's last tall tile takes less time if it has rows for one warpgroup alone. The kernel of
    the short tile leaves nothing out.
    """
    tiles = -(-problem.query_length // rows)
    rounds = -(-_heads(problem) * tiles // multiprocessors)
    has_lone_last = 0 < problem.query_length % rows <= WARPGROUP_ROWS and tiles > 1
    if has_lone_last and rows > 2 * WARPGROUP_ROWS:
        return rounds - (1 - LONE_SHARE) * (rounds // tiles)
    return rounds


def _tile_keys(problem: Problem, rows: int) -> list[int]:
    """Returns how many keys each tile of a head computes, as if all lengths were the longest.

    Where there are more keys than queries, offsets are not known: all tiles have as many keys.
    """
    left, right = problem.window
    keys = problem.key_length
    is_square = problem.query_length == keys
    found = []
    for first in range(0, problem.query_length, rows):
        begin, end = max(first - left, 0), min(first + rows + right, keys)
        if not is_square:
            begin, end = 0, min(left + rows + right, keys)
        begin, end = begin // _BLOCK_KEYS, -(-end // _BLOCK_KEYS)
        found.append((end - begin) * _BLOCK_KEYS)
    return found


def _mean_keys(problem: Problem) -> int:
    """About how many keys a row sees in the mean, or more: of symbolic lengths nothing is known."""
    seen = sum(problem.window) + 1
    rows, keys = problem.query_length, problem.key_length
    if not (problem.band and isinstance(rows, int) and isinstance(keys, int)):
        return seen
    # In a square under a causal mask the first row sees one key, the last one all.
    return min(seen, keys // 2 if rows == keys and problem.window[1] == 0 else keys)
