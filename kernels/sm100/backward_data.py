"""Data of the Blackwell backward's main kernel: its constants, its operands, a CTA's work."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax.key import KernelKey
from kernels.common import backward_ranges, backward_schedule, tensors
from kernels.common import ptx as common_ptx
from kernels.common.backward_schedule import BackwardShape, StartIndex, Work
from kernels.common.bias import BiasInMemory
from kernels.common.resources import Barriers, Shared
from kernels.common.row_ranges import RangesInMemory
from kernels.common.schedule import await_count
from kernels.common.state import Rows
from kernels.interface import BiasBuffers, RangeBuffers, Sizes, Window
from kernels.sm100 import products
from kernels.sm100.backward_description import description
from kernels.sm100.tiles import (
    BACKWARD_TILES,
    DETERMINISTIC_BAND_HEADS,
    L2_BUDGET_BYTES,
    LANES,
    AnyBackwardTile,
    BackwardTile,
)


class BackwardConfig:
    """Compile-time constants of a main backward kernel, of one CTA or a pair; the roles share them.

    Attributes:
      tile: its sizes.
    """

    tile: AnyBackwardTile

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.band = key.band
        self.ranges, self.bias = key.ranges, key.bias
        self.deterministic = key.deterministic
        self.description = description(
            key.head_dim, key.value_dim, key.deterministic, key.pair, key.ranges
        )
        self.columns = self.description.columns
        tile = BACKWARD_TILES[key.head_dim, key.value_dim, key.pair]
        ordered_band = key.deterministic and key.band
        self.shape = BackwardShape(
            m=tile.m,
            n=tile.n,
            row_bytes=tile.head_dim * (2 + 4) + tile.value_dim * 2,
            l2_bytes=L2_BUDGET_BYTES,
            least_heads=DETERMINISTIC_BAND_HEADS // tile.ctas if ordered_band else 1,
            band=key.band,
        )


class Config(BackwardConfig):
    """The constants of a kernel with one CTA a key tile, and its five products."""

    tile: BackwardTile

    def __init__(self, key: KernelKey):
        super().__init__(key)
        tile = BACKWARD_TILES[key.head_dim, key.value_dim, key.pair]
        assert isinstance(tile, BackwardTile)
        self.tile = tile
        n = self.tile.n
        self.scores = products.Product(self.dtype, n, self.tile.m)
        self.dv = products.Product(self.dtype, n, tile.value_dim)
        self.dk = products.Product(self.dtype, n, tile.head_dim)
        self.dq = products.Product(self.dtype, LANES, self.tile.dq_width)

    @property
    def dq_takes_dp(self) -> bool:
        """Whether dQ begins with dP's columns."""
        return self.columns("dq").shares == "dp"


@cute.jit
def take_ticket(config: cutlass.Constexpr[BackwardConfig], shared: Shared, dq_ticket: cute.Pointer):
    """Order warp: draws the ticket of the CTA, or of the pair, among those that have started.

    A CTA waits only for additions of CTAs with lower tickets, and these have started, whatever
    order the hardware starts CTAs in and however few are resident at a time. So none waits for
    ever.
    """
    cute.arch.griddepcontrol_wait()
    cta, _, _ = cute.arch.block_idx()
    if cta % config.tile.ctas == 0:
        with cute.arch.elect_one():
            place = cute.make_tensor(shared.ticket, cute.make_layout(1))
            place[0] = common_ptx.take_ticket(dq_ticket)


def start_index(config: BackwardConfig, shared: Shared) -> Int32:
    """Returns the place of this CTA, or pair, in the order of work; a barrier comes before."""
    if config.deterministic and config.tile.ctas == 2:
        return cute.arch.make_warp_uniform(common_ptx.load_of_even(shared.ticket))
    if config.deterministic:
        ticket = cute.make_tensor(shared.ticket, cute.make_layout(1))[0]
        return cute.arch.make_warp_uniform(ticket)
    cta, _, _ = cute.arch.block_idx()
    return cta // config.tile.ctas


@dataclasses.dataclass(frozen=True)
class Call:
    """What the division of work depends on besides the kernel.

    Attributes:
      extents: of each batch element.
      ranges: of its rows, where they are in memory.
      bias: of its scores, where they have one.
    """

    extents: cute.Pointer
    sizes: Sizes
    window: Window
    ranges: RangeBuffers | None = None
    bias: BiasBuffers | None = None


def assign(config: BackwardConfig, shared: Shared, call: Call) -> Work:
    """Returns the key tile of this CTA or pair; a whole warp calls it."""

    def start() -> StartIndex:
        cta, _, _ = cute.arch.block_idx()
        rank = cta % config.tile.ctas
        return StartIndex(start_index(config, shared), rank)

    work = backward_schedule.assign(
        config.shape, call.extents, call.sizes, call.window, start, call.ranges
    )
    if config.bias:
        work = dataclasses.replace(work, bias=BiasInMemory(call.bias, call.sizes, call.extents))
    if not config.ranges:
        return work
    work = backward_schedule.by_table(work, call.ranges, call.sizes, config.shape)
    ranges = RangesInMemory(call.ranges, call.sizes, work.batch)
    return dataclasses.replace(work, ranges=ranges, published=shared.visits)


@cute.jit
def publish(
    config: cutlass.Constexpr[BackwardConfig], work: Work, walk: cute.Tensor | None, step: Int32
):
    """Load warp: writes which query block a step is, where rows have ranges in memory.

    walk: of `make_walk`; the warp calls this for one step after the other.
    """
    if cutlass.const_expr(walk is not None):
        m, slots = config.tile.m, cute.size(work.published, mode=[1])
        _, block = work.walk_to(walk, step, m, config.deterministic)
        hidden = backward_ranges.hidden(work.visits, block, m)
        with cute.arch.elect_one():
            work.published[0, step & (slots - 1)] = block
            work.published[1, step & (slots - 1)] = hidden
        cute.arch.sync_warp()


@cute.jit
def take_turns(
    config: cutlass.Constexpr[BackwardConfig], barriers: Barriers, work: Work, rows: Rows
):
    """Order warp: lets the key tiles that visit a query tile add their dQ in ascending order.

    The CTAs of a pair, which have different columns of dQ, add at the same time.
    """
    tile, walk = config.tile, backward_ranges.make_walk(work.visits)
    for step in cutlass.range(work.steps(), unroll=1):
        if cutlass.const_expr(walk is None):
            head, block = work.step(step, True)
        else:
            head, block = work.walk_to(walk, step, tile.m, True)
        counter = rows.dq_order + rows.tile(work.batch, work.heads, head, block)
        shape = (tile.m, tile.n)
        earlier = backward_schedule.earlier_tiles(work, block, config.band, shape) * tile.ctas
        with cute.arch.elect_one():
            await_count(counter, earlier)
            cute.arch.mbarrier_arrive(barriers.dq_turn.at(step))
            barriers.dq_added.wait(step)
            common_ptx.increment_release(counter)
