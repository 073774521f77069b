"""What the roles of a kernel carry from block to block and from tile to tile."""

import dataclasses

import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.interface import ForwardScalars


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a role has done since the kernel began.

    Attributes:
      tiles: query tiles that had blocks.
      blocks: their key blocks.
    """

    tiles: Int32
    blocks: Int32

    def after(self, blocks: Int32) -> "Progress":
        """The progress after one more tile, of `blocks` blocks."""
        return Progress(self.tiles + 1, self.blocks + blocks)


@dataclasses.dataclass(frozen=True)
class Scales:
    """How scores become exponents.

    Attributes:
      scale_log2: of a score, in units of log2.
      lag_limit: by how much a row's maximum may exceed its reference, in units of scores.
    """

    scale_log2: Float32
    lag_limit: Float32


def make_scales(scalars: ForwardScalars) -> Scales:
    """The scales of a call."""
    return Scales(scalars.scale_log2, scalars.rescale_threshold_log2 / scalars.scale_log2)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The keys low <= j < high that a row sees; tensors where a thread has several rows."""

    low: Int32 | cute.Tensor
    high: Int32 | cute.Tensor
