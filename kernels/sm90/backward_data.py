"""Data of the Hopper backward's main kernel: its operands, its work, its products."""

import dataclasses

import cutlass.cute as cute
from cutlass import Int32

from kernels.sm90 import wgmma
from kernels.sm90.tiles import BackwardTile


@dataclasses.dataclass(frozen=True)
class Step:
    """One query block of one query head, for a warpgroup.

    Attributes:
      member: the query head, counted within its group.
      block: the query block.
      index: of the step among all of the CTA's.
      group: which of the MMA warpgroups it is.
    """

    member: Int32
    block: Int32
    index: Int32
    group: Int32


@dataclasses.dataclass(frozen=True)
class KeyGradients:
    """A warpgroup's accumulators of dK and dV, in registers."""

    dk: cute.Tensor
    dv: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Products:
    """The five matrix products, transposed scores first."""

    scores: wgmma.Wgmma  # S^T and dP^T: (n, m)
    grads: wgmma.Wgmma  # dV and dK: (n, head_dim)
    dq: wgmma.Wgmma  # dQ: (m, head_dim)


def make_products(dtype, head_dim: int, tile: BackwardTile) -> Products:
    """Returns the products; it decides how the two warpgroups tile each."""
    d = head_dim
    k_major, mn_major = wgmma.K_MAJOR, wgmma.MN_MAJOR
    if tile.split_keys:
        scores = wgmma.Wgmma(dtype, (2, 1), tile.m, (k_major, k_major))
        grads = wgmma.Wgmma(dtype, (2, 1), d, (k_major, mn_major), wgmma.REGISTERS)
    else:
        scores = wgmma.Wgmma(dtype, (1, 2), tile.m // 2, (k_major, k_major))
        grads = wgmma.Wgmma(dtype, (1, 2), d // 2, (k_major, mn_major))
    warpgroups, columns = ((2, 1), d) if tile.split_rows else ((1, 2), d // 2)
    dq = wgmma.Wgmma(dtype, warpgroups, columns, (mn_major, mn_major))
    return Products(scores, grads, dq)
