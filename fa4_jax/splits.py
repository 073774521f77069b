"""Short queries: when a forward divides the keys among thread blocks, and into how many parts.

Decoding asks for few query rows and many keys. The ordinary forward then has a tile of 128 rows for
one row, reads K and V once for every query head, and has too few tiles for all multiprocessors. The
split forward packs the rows of a group, (token, head of the group), into tiles of 16 to 64 rows,
and divides the keys; a second kernel joins the parts by their log-sum-exp, if there are several.

Both decisions depend on shapes alone, never on lengths: the same call gives the same bits whatever
its neighbours in the batch are, and a program serves all lengths.
"""

from __future__ import annotations

from fa4_jax.key import SPLIT_KEYS, SPLIT_MOST_PARTS, SPLIT_ROWS
from fa4_jax.problem import Problem

MULTIPROCESSORS = {"sm_90a": 132, "sm_100f": 148}
"""Of the GPUs that the number of parts is chosen for: H100 and H200, B200."""

LEAST_KEYS = 256
"""Fewer keys are not worth a second launch. Not measured yet."""

COST_BLOCKS = 2
"""Blocks that take about as long as a part's start and end. Other values were not measured."""

Parts = tuple[int, int, int, int, int, int]
"""Shape of the buffer `parts`, which has no elements: (parts of the keys, blocks of rows, N where
the largest scores are wanted or else 0, parts that have to be joined, 1 where none have, 0)."""


def takes(problem: Problem) -> bool:
    """Whether a problem runs on the split forward, which reads no mask of pairs and no bias."""
    if problem.has_mask or problem.bias is not None:
        return False
    sizes = (
        *(problem.batch, problem.query_length, problem.key_length),
        *(problem.query_heads, problem.kv_heads),
    )
    if not all(isinstance(size, int) for size in sizes) or 0 in sizes:
        return False  # Of symbolic sizes nothing is known.
    rows = problem.query_length * problem.group
    return rows <= SPLIT_ROWS and problem.key_length >= LEAST_KEYS


def has_few_rows(problem: Problem) -> bool:
    """Whether one CTA of the split forward holds all rows of a group; of symbolic sizes yes."""
    rows = problem.query_length * problem.group
    return not isinstance(rows, int) or rows <= SPLIT_ROWS


def parts(problem: Problem, arch: str) -> Parts:
    """Shape of the buffer `parts` of a problem that the split forward takes.

    The thread blocks run in waves, one on each multiprocessor. It may hold two, but one saturates
    its share of the memory, and twice as many parts took 1 to 6 % longer (B, S, K = 1, 8192, 8; 1,
    65536, 8; 8, 8192, 8 at d = 128 on an H200: benchmarks/results/nvidia-h200-decode.md). The
    number of parts is the least of those for which the waves take the shortest time, in blocks of
    keys.
    """
    row_blocks = -(-problem.query_length * problem.group // SPLIT_ROWS)
    each = problem.batch * problem.kv_heads * row_blocks
    slots = MULTIPROCESSORS[arch]
    blocks = -(-problem.key_length // SPLIT_KEYS)

    def cost(splits: int) -> int:
        return -(-each * splits // slots) * (-(-blocks // splits) + COST_BLOCKS)

    count = min(range(1, min(blocks, slots, SPLIT_MOST_PARTS) + 1), key=cost)
    return shape(count, row_blocks, problem.query_heads if problem.returns_max_logit else 0)


def shape(count: int, row_blocks: int, max_heads: int) -> Parts:
    """Shape of the buffer `parts`: one part of all keys is not joined, since it is the result."""
    whole = count == 1
    return count, row_blocks, max_heads, 0 if whole else count, int(whole), 0


def are_joined(parts: tuple[int, ...]) -> bool:
    """Whether a second kernel joins the parts; parts: shape of the buffer."""
    return parts[3] > 0
