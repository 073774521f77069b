"""Data of the Blackwell forward: its constants, its operands, the work of a tile."""

import cutlass.cute as cute
from cutlass import Int32

from fa4_jax.key import KernelKey
from kernels.common import tensors
from kernels.common.resources import Barriers, Shared
from kernels.common.ring import Ring, Use, nth_use
from kernels.common.schedule import ForwardShape
from kernels.interface import Window
from kernels.sm100 import products
from kernels.sm100.forward_description import RANGE_WORDS, WORK_WORDS, of_key
from kernels.sm100.forward_schedule import Work, from_words, to_words
from kernels.sm100.tiles import (
    BUFFERS,
    FORWARD_TILES,
    L2_BUDGET_BYTES,
    RANGES_POLYNOMIAL_PAIRS,
)


class Config:
    """Compile-time constants of one kernel, shared by its roles."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim = key.head_dim
        self.band, self.ranges, self.bias = key.band, key.ranges, key.bias
        self.tile = FORWARD_TILES[key.head_dim, key.pair]
        self.description = of_key(key)
        pairs = self.tile.polynomial_pairs
        if key.ranges:
            pairs = min(pairs, RANGES_POLYNOMIAL_PAIRS)
        self.polynomial_pairs = pairs if key.polynomial_exp2 else 0
        self.columns = self.description.columns
        self.shape = ForwardShape(
            m=self.tile.m,
            n=self.tile.n,
            kv_row_bytes=2 * key.head_dim * 2,
            l2_bytes=L2_BUDGET_BYTES,
            band=key.band,
        )

    def block(self, t: Int32 | int, ordinal: Int32) -> Use:
        """Returns the use of the score buffers by query tile t's block, the ordinal-th of this CTA.

        Each of two query tiles has a buffer of its own; a single one takes both in turn.
        """
        if self.tile.buffers_per_tile == 1:
            return Use(t, ordinal & 1)
        return nth_use(ordinal, BUFFERS)

    def part_full(self, barriers: Barriers, part: int) -> Ring:
        """Returns the ring whose phases say, block by block, that a part of P is there."""
        if part == 0:
            return barriers.p_early
        later = len(self.tile.p_splits) - 1
        return Ring(barriers.p_late.first + (part - 1), BUFFERS, later)


def push_work(config: Config, shared: Shared, round_index: Int32, work: Work):
    """Schedule warp: says what this CTA's tile in a round is, once the slot is free."""
    use = shared.barriers.work_empty.use(round_index)
    shared.barriers.work_empty.wait_free(use)
    with cute.arch.elect_one():
        for i, word in enumerate(to_words(work, config.ranges)):
            shared.work[i, use.slot] = word
        cute.arch.mbarrier_arrive(shared.barriers.work_full.at(use))


def peek_work(
    config: Config, shared: Shared, round_index: Int32, window: Window | None = None
) -> Work:
    """Returns the work of this CTA's tile in a round, as the schedule warp wrote it.

    window: of a band kernel, for roles that apply the mask.
    """
    use = shared.barriers.work_full.use(round_index)
    shared.barriers.work_full.wait(use)
    count = WORK_WORDS + (RANGE_WORDS if config.ranges else 0)
    words = [shared.work[i, use.slot] for i in range(count)]
    return from_words(words, window, config.ranges)


def pop_work(
    config: Config, shared: Shared, round_index: Int32, window: Window | None = None
) -> Work:
    """Returns what `peek_work` does, for the last time: the schedule warp may overwrite it then."""
    work = peek_work(config, shared, round_index, window)
    products.arrive(shared.barriers.work_empty.at(round_index))
    return work
