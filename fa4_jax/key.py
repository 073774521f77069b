"""The kernel key: the one vocabulary shared by the build list, plan, supports() and the tests.

A key names everything about a kernel that is fixed when it is compiled. What varies from call to
call (lengths, scale, window, query offset, rescale threshold) is a runtime parameter instead.
This module imports nothing, so that build tools and documentation can read it cheaply.
"""

from __future__ import annotations

import dataclasses
import enum


class Pass(enum.StrEnum):
    """The kernels of one attention call. The backward runs its three in this order, and after them
    the gradient of a bias, where a call has one.

    The forward of a call with few query rows is two kernels: one for parts of the keys, and one
    that joins their results. Tangents follow a forward; Hessian-vector products, of queries and of
    keys and values, follow tangents.
    """

    FORWARD = "fwd"
    FORWARD_SPLIT = "fwd_split"
    FORWARD_JOIN = "fwd_join"
    TANGENT = "tangent"
    HESSIAN_QUERY = "hessian_q"
    HESSIAN_KEY = "hessian_kv"
    BACKWARD_PRE = "bwd_pre"
    BACKWARD = "bwd"
    BACKWARD_POST = "bwd_post"
    BIAS_GRADIENT = "bias_grad"


HEAD_DIM_TILES = (64, 96, 128, 192, 256)
"""Head dims with a tile of their own; a narrower head runs in the next wider one (zero fill)."""

DTYPES = ("bf16", "fp16")

POLYNOMIAL_EXP2_TILES = frozenset({("sm_100f", 64), ("sm_100f", 96), ("sm_100f", 128)})
"""(arch, head_dim) whose fast forward computes a share of its exponentials on the FMA pipe.

None on sm_90a, where it was measured not to pay: docs/hopper.md.
None above 128, where the tensor core is busy for longer than the special-function unit.
"""


HESSIAN_PASSES = (Pass.HESSIAN_QUERY, Pass.HESSIAN_KEY)
"""The kernels of a Hessian-vector product."""

HESSIAN_HEAD_DIMS = frozenset(("sm_90a", d) for d in (64, 96, 128))
"""(arch, head_dim) with kernels for Hessian-vector products, where there is one for tangents."""


NARROW_VALUES = {
    ("sm_90a", Pass.FORWARD, 192): 128,
    ("sm_90a", Pass.BACKWARD, 192): 128,
    ("sm_100f", Pass.BACKWARD, 192): 128,
}
"""The most columns of values for which (arch, pass, head_dim) has kernels of its own: DeepSeek's.

On Hopper these kernels spare a sixth of the forward's products and 13 % of the backward's.
Blackwell's backward is one CTA's: where tensor memory cannot hold dV and dK of 192 columns each, it
can hold 128 and 192.
"""


WARPGROUP_ROWS = 64
"""Rows of a warpgroup's product on Hopper."""


@dataclasses.dataclass(frozen=True)
class ShortTile:
    """A second tile of a forward, with fewer query rows; `fa4_jax.tile_choice` says when it runs.

    It wastes less of the blocks at both ends of a band. Soft caps and masks of pairs always take
    it: three warpgroups have no registers for them.

    Attributes:
      rows, tall_rows: query rows of this tile and of the other one.
      takes_ranges: whether all calls whose rows have ranges of keys take it, for the same reason.
    """

    rows: int
    tall_rows: int
    takes_ranges: bool = False


SHORT_TILES = {
    ("sm_90a", 64): ShortTile(128, 192),
    ("sm_90a", 96): ShortTile(128, 192, takes_ranges=True),
}
"""By (arch, head_dim)."""


DENSE_TILES = {("sm_90a", 128): ShortTile(128, 192)}
"""(arch, head_dim) whose dense forwards have a taller tile than those of a band, and both.

The short one is that of the kernel with a band, which then limits nothing: docs/hopper-power.md.
"""


NARROW_TILES = {("sm_90a", 64): 384}
"""(arch, head_dim) with a third tile of a forward, of 64 rows and blocks of 64 keys, for windows:
the most keys that a row may see in the mean where it runs.

Calls without masks of pairs, soft caps and biases take it, as GPT-OSS does with sinks and a window
of 128: docs/hopper.md.
"""


SINKS_WITH_BANDS = frozenset({("sm_90a", 64)})
"""(arch, head_dim) of kernels for calls with sinks and nothing else in memory, as GPT-OSS has them.

Other such calls take a kernel with ranges, which is slower: at a window of 128 it took 6 % longer.
"""

MAY_LACK_RANGES = frozenset({"sm_90a"})
"""Architectures whose forwards with ranges take calls without any, for their sinks, say: the arrays
are then without elements."""

SPLIT_ROWS = 64
"""Packed rows, (token, head of a group), of a CTA of the split forward."""

SPLIT_KEYS = 64
"""Keys of a block of the split forward: its CTAs take the blocks of a sequence in turn."""

SPLIT_MOST_PARTS = 512
"""Parts that the keys are divided into at most."""

PAGE_KEYS = 16
"""Keys that the split forward loads of a page at a time; a page's length is a multiple of it."""

SPLIT_CTAS = {64: 2, 96: 2, 128: 2, 192: 1, 256: 1}
"""CTAs of the split forward that one multiprocessor holds at a time, by head dim tile."""


STATISTICS_ROWS = 64
"""Of what kernels of Hessian-vector products read of query rows (`row_statistics`), a head's rows
are padded to a multiple of this.
"""


TICKETS_WITH_BANDS = frozenset({"sm_90a"})
"""Architectures whose forwards deal tiles by ticket under a band alone.

In a dense call all tiles are equal, and a counter costs it 1 % in the mean (docs/hopper.md).
"""


CAPPED_APART = frozenset({"sm_90a"})
"""Architectures on which soft caps have kernels of their own; elsewhere kernels with ranges read a
cap, for which a branch in every block costs nothing that can be noticed.
"""


READS_MASKS = frozenset({"sm_90a", "sm_100f"})
"""Architectures whose kernels with ranges read bits of a mask of pairs, where a call has one."""


BIAS_GRADIENT_TILES = {"sm_90a": 128, "sm_100f": 64}
"""Query rows, and keys, of a tile of a bias's gradient."""

DISTANCE_MARGIN = 256
"""Elements on either side of a bias by distance that Hopper's kernels may read: more than the rows
or keys of any tile, so that nothing is compared with the lengths."""

FAR_NUMBERS = 4
"""Numbers that say what scores far from the diagonal get of a bias by distance; bias_buffer."""

MOST_REACH = 2**24
"""The furthest distance among them: float32 holds it exactly."""

BAND_GAP = 160
"""Zeros before each row of a banded bias's copy that kernels may read: at least the keys of any
block and the rows of a warp, or the other way round, so that they compare no element with the
band's ends."""

NO_BAND = 2**31 - 1
"""What kernels get as the first distance of a bias that is not banded (`fa4_jax.bias.banded`)."""


_FLAGS = (
    *("band", "ranges", "soft_cap", "bias", "sinks", "deterministic", "polynomial_exp2", "pair"),
    *("short", "narrow", "paged"),
)
"""Flags of a key, in the order of its name."""


@dataclasses.dataclass(frozen=True, order=True)
class KernelKey:
    """What is fixed in one compiled kernel.

    Attributes:
      arch: "sm_90a" or "sm_100f".
      kernel: which pass.
      dtype: "bf16" or "fp16": storage of q, k, v, o and of their gradients.
      head_dim: tile head dim, one of HEAD_DIM_TILES.
      band: keys are limited per row, lo(i) <= j <= hi(i) (causal and window); False is dense.
      deterministic: dQ is accumulated in a fixed order (backward only).
      polynomial_exp2: part of the exponentials is a polynomial (forward only).
      value_dim: tile head dim of values, output and their gradients; head_dim if not given.
      ranges: besides the band, each row has a range of keys in memory, and perhaps tags; a forward
        takes sinks and returns largest scores, too.
      soft_cap: scores are capped, by a number in memory; only with ranges, and on CAPPED_APART.
      pair: two CTAs of a cluster share operands, where a kernel of one CTA is built, too.
      short: the tile has fewer query rows, where there are two (forward only).
      narrow: the tile is the one of NARROW_TILES (forward only).
      paged: K and V lie in pages, which a table names (forward and split forward).
      bias: numbers in memory are added to the scores; with a band, without ranges.
      sinks: a forward takes sinks, and has a band, but no ranges; SINKS_WITH_BANDS.
    """

    arch: str
    kernel: Pass
    dtype: str
    head_dim: int
    band: bool = False
    deterministic: bool = False
    polynomial_exp2: bool = False
    value_dim: int = 0
    ranges: bool = False
    soft_cap: bool = False
    pair: bool = False
    short: bool = False
    narrow: bool = False
    paged: bool = False
    bias: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def reads_cap(self) -> bool:
        """Whether the kernel reads a soft cap; without the flag it may be 0, which is none."""
        return self.soft_cap or (self.ranges and self.arch not in CAPPED_APART)

    @property
    def reads_mask(self) -> bool:
        """Whether the kernel reads bits of a mask of pairs, which a call may lack.

        The registers of a backward with a soft cap of its own do not suffice for them, nor do those
        of a forward that has a shorter tile beside it.
        """
        if self.kernel is Pass.FORWARD:
            lacks_registers = (self.arch, self.head_dim) in SHORT_TILES and not self.short
        else:
            lacks_registers = self.soft_cap
        return self.ranges and self.arch in READS_MASKS and not lacks_registers

    @property
    def pairwise_bias(self) -> bool:
        """Whether it reads two elements of a bias at once (`fa4_jax.bias_buffer`): on Hopper.

        The forwards of d = 192 and 256 have no registers for it.
        """
        fits = self.head_dim <= 128 or self.kernel is not Pass.FORWARD
        return self.arch == "sm_90a" and fits

    @property
    def band_as_given(self) -> bool:
        """Whether it reads a banded bias as the caller has it, and compares places with the band's
        ends; other kernels read a copy with zeros between its rows (`fa4_jax.bias_buffer`).
        """
        return self.arch == "sm_90a" and self.kernel is Pass.FORWARD

    @property
    def name(self) -> str:
        """Unique readable name, e.g. "sm_90a_fwd_bf16_d128_band"."""
        head_dims = f"d{self.head_dim}"
        if self.value_dim != self.head_dim:
            head_dims += f"x{self.value_dim}"
        parts = [self.arch, str(self.kernel), self.dtype, head_dims]
        parts += [flag for flag in _FLAGS if getattr(self, flag)]
        return "_".join(parts)


def head_dim_tile(head_dim: int) -> int | None:
    """Narrowest tile that holds head_dim, or None if there is none."""
    return next((tile for tile in HEAD_DIM_TILES if head_dim <= tile), None)


def value_dim_tile(arch: str, kernel: Pass, tile: int, value_dim: int) -> int:
    """Tile head dim of values in a forward or backward whose head dim has tile `tile`."""
    narrow = NARROW_VALUES.get((arch, kernel, tile), 0)
    return narrow if value_dim <= narrow else tile
