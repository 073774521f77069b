"""The schemes of context parallelism, as values.

Bytes that a device receives, with n devices and a K/V shard of `block` bytes in storage type:

    Ring         forward (n - 1) block; backward twice that (K and V again, then dK and dV)
    AllGather    the same, in three collectives instead of steps; the whole K and V in memory
    Ulysses      (n - 1) / n of the shards of Q, K, V and O; the backward the same
"""

from __future__ import annotations

import dataclasses

from fa4_jax import validate
from fa4_jax.parallel.layout import LAYOUTS, Layout


@dataclasses.dataclass(frozen=True)
class _OneAxis:
    """A scheme over one mesh axis.

    Attributes:
      axis: mesh axis that the sequences are sharded over.
      layout: "contiguous" or "zigzag"; the latter balances causal attention.
    """

    axis: str
    layout: Layout = "contiguous"

    def __post_init__(self) -> None:
        validate.choice("layout", self.layout, LAYOUTS)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that the sequences are sharded over, major first."""
        return (self.axis,)


@dataclasses.dataclass(frozen=True)
class Ring(_OneAxis):
    """K/V shards travel from device to device while each attends with its own queries.

    Attributes:
      axis: mesh axis that the sequences are sharded over.
      layout: "contiguous" or "zigzag"; the latter balances causal attention.
    """


@dataclasses.dataclass(frozen=True)
class AllGather(_OneAxis):
    """Each device gathers the K and V that its queries see: all, or a window's neighbours.

    Attributes: as `Ring`.
    """


@dataclasses.dataclass(frozen=True)
class Ulysses(_OneAxis):
    """Sequence shards are exchanged for shards of the heads (DeepSpeed-Ulysses, all-to-all).

    Attributes: as `Ring`; zig-zag brings nothing here but that of neighbouring layers.
    """


@dataclasses.dataclass(frozen=True)
class RingUlysses:
    """Ulysses within the shards of one axis (fast links), a ring over another (slow links).

    The sequence is sharded over the ring's axis in its layout, each shard evenly over the other.

    Attributes:
      ring_axis, ulysses_axis: two mesh axes.
      layout: over the ring's axis, as `Ring`.
    """

    ring_axis: str
    ulysses_axis: str
    layout: Layout = "contiguous"

    def __post_init__(self) -> None:
        validate.choice("layout", self.layout, LAYOUTS)
        if self.ring_axis == self.ulysses_axis:
            raise ValueError(f"ring_axis and ulysses_axis are both {self.ring_axis!r}")

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that the sequences are sharded over, major first."""
        return self.ring_axis, self.ulysses_axis


Scheme = Ring | AllGather | Ulysses | RingUlysses
