"""Data of the Hopper backward's main kernel: its operands, its work, its products."""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.sm90 import wgmma
from kernels.sm90.tiles import WARPGROUP_ROWS, BackwardTile


@dataclasses.dataclass(frozen=True)
class Step:
    """One query block of one query head, for a warpgroup.

    Attributes:
      member: the query head, counted within its group.
      block: the query block.
      index: of the step among all of the CTA's.
      group: which of the MMA warpgroups it is.
      hidden: what ranges hide in the block (backward_ranges), where rows have them in memory.
      words: all that the load warp has published of the step, in shared memory.
      is_first: whether it is the first of its key tile.
      of_tile: words of the key tile (backward_tiles), where a CTA has one after the other.
    """

    member: Int32
    block: Int32
    index: Int32
    group: Int32
    hidden: Int32 | int = 0
    words: Any = None
    is_first: cutlass.Boolean | bool = False
    of_tile: Any = None


@dataclasses.dataclass(frozen=True)
class KeyGradients:
    """A warpgroup's accumulators of dK and dV, in registers."""

    dk: cute.Tensor
    dv: cute.Tensor


@dataclasses.dataclass(frozen=True)
class KeySlices:
    """What a warpgroup's registers hold of its keys, or None: operands of S^T and dP^T."""

    k: cute.Tensor | None
    v: cute.Tensor | None


@dataclasses.dataclass(frozen=True)
class Products:
    """The five matrix products, transposed scores first."""

    scores: wgmma.Wgmma  # S^T and dP^T: (n, m)
    dv: wgmma.Wgmma  # (n, value_dim)
    dk: wgmma.Wgmma  # (n, head_dim)
    dq: wgmma.Wgmma  # dQ: (m, head_dim), or half of its columns in a pair


def make_products(dtype, head_dim: int, value_dim: int, tile: BackwardTile) -> Products:
    """Returns the products; it decides how warpgroups tile each.

    Where a CTA has 128 keys, both warpgroups have 64 of them; in a pair each product of 64 keys is
    one warpgroup's.
    """
    groups, k_major = (tile.n // WARPGROUP_ROWS, 1), wgmma.K_MAJOR
    scores = wgmma.Wgmma(dtype, groups, tile.m, (k_major, k_major))
    dv, dk = (
        wgmma.Wgmma(dtype, groups, columns, (k_major, wgmma.MN_MAJOR), wgmma.REGISTERS)
        for columns in (value_dim, head_dim)
    )
    return Products(scores, dv, dk, query_gradient_product(dtype, head_dim // tile.ctas, tile))


def query_gradient_product(dtype, columns: int, tile: BackwardTile) -> wgmma.Wgmma:
    """Returns the product that has `columns` columns of dQ."""
    warpgroups, columns = ((2, 1), columns) if tile.split_rows else ((1, 2), columns // 2)
    return wgmma.Wgmma(dtype, warpgroups, columns, (wgmma.MN_MAJOR, wgmma.MN_MAJOR))
