"""Data of the Blackwell backward's kernel for pairs: its constants and its operands."""

from cutlass import Int32

from fa4_jax.key import KernelKey
from kernels.common import tensors
from kernels.common.ring import Use
from kernels.sm100 import products
from kernels.sm100.backward_description import description
from kernels.sm100.tiles import BACKWARD_TILES, BUFFERS, BackwardPairTile


def use_of_buffer(step: Int32) -> Use:
    """Returns the use that a step makes of the barriers of two buffers.

    It equals `nth_use(step, BUFFERS)`; but shifts in place of divisions would change the kernels'
    PTX, which was proven as it is.
    """
    return Use(step % BUFFERS, step // BUFFERS & 1)


class Config:
    """Compile-time constants of one kernel and its five products; the roles share them."""

    def __init__(self, key: KernelKey):
        tile = BACKWARD_TILES[key.head_dim, key.value_dim]
        assert isinstance(tile, BackwardPairTile)
        self.tile = tile
        self.description = description(key.head_dim, key.value_dim, key.deterministic)
        self.dtype = tensors.TYPES[key.dtype]
        self.band = key.band
        self.deterministic = key.deterministic
        self.columns = self.description.columns
        self.scores = products.Product(self.dtype, tile.n, tile.m, ctas=2)
        self.grads = products.Product(self.dtype, tile.n, tile.head_dim, ctas=2)
        self.dq = products.Product(self.dtype, tile.head_dim, tile.m, ctas=2)
