"""Data of the Blackwell tangent kernel: its constants, and what a thread holds of its row."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax import bands
from fa4_jax.key import KernelKey
from kernels.common import tensors
from kernels.common.ring import Ring, nth_use
from kernels.common.schedule import ForwardShape
from kernels.common.tangent_statistics import lse_log2
from kernels.sm100.forward_schedule import Work
from kernels.sm100.tangent_description import description
from kernels.sm100.tiles import BUFFERS, L2_BUDGET_BYTES, TANGENT_TILES


class Config:
    """Compile-time constants of one kernel, shared by its roles."""

    ranges = False

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim, self.band = key.head_dim, key.band
        self.tile = TANGENT_TILES[key.head_dim]
        self.description = description(key.head_dim)
        self.columns = self.description.columns
        self.shape = ForwardShape(
            m=self.tile.m,
            n=self.tile.n,
            kv_row_bytes=4 * key.head_dim * 2,
            l2_bytes=L2_BUDGET_BYTES,
            band=key.band,
        )

    def buffer(self, t: Int32 | int, ordinal: Int32) -> Int32 | int:
        """Returns the score buffer of query tile t's block, the ordinal-th of this CTA.

        Each of two query tiles has a buffer of its own; a single one takes both in turn.
        """
        return t if self.tile.query_tiles == BUFFERS else nth_use(ordinal, BUFFERS).slot

    def ring(self, buffers: Ring, t: Int32 | int) -> Ring:
        """Returns the barriers that query tile t's blocks use in turn, of those of both buffers."""
        return buffers[t] if self.tile.query_tiles == BUFFERS else buffers


@dataclasses.dataclass(frozen=True)
class Row:
    """A thread's row of a tile.

    Attributes:
      query: of the row.
      low, high: keys low <= j < high that it sees.
      lse_log2: inf where it sees no key, so that its P is 0.
      lse_tangent: of the row's head, [query_length].
    """

    query: Int32
    low: Int32
    high: Int32
    lse_log2: Float32
    lse_tangent: cute.Tensor

    @property
    def sees(self) -> cutlass.Boolean:
        """Whether it sees any key."""
        return self.lse_log2 != Float32.inf


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums of P and W of a row so far."""

    total: Float32
    weighted: Float32


@cute.jit
def make_row(work: Work, query: Int32, of_head: tuple[cute.Tensor, cute.Tensor]) -> Row:
    """Returns a row of a tile; of_head: LSE of its head, and its tangent."""
    low, high = bands.row_limits(work.band, query, tensors.INT32)
    own = Float32.inf
    if query < work.band.query_length:
        own = lse_log2(of_head[0][query])
    return Row(query, low, high, own, of_head[1])
