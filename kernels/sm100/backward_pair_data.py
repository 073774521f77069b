"""Data of the Blackwell backward's two kernels for pairs: their constants and their products."""

from cutlass import Int32

from fa4_jax.key import KernelKey
from kernels.common.ring import Use
from kernels.sm100 import products
from kernels.sm100.backward_data import BackwardConfig
from kernels.sm100.tiles import (
    BACKWARD_TILES,
    BUFFERS,
    LANES,
    BackwardM256Tile,
    BackwardPairTile,
)


def use_of_buffer(step: Int32) -> Use:
    """Returns the use that a step makes of the barriers of two buffers.

    It equals `nth_use(step, BUFFERS)`; but shifts in place of divisions would change the kernels'
    PTX, which was proven as it is.
    """
    return Use(step % BUFFERS, step // BUFFERS & 1)


class PairConfig(BackwardConfig):
    """The constants of a kernel with a pair of CTAs a key tile."""

    tile: BackwardPairTile | BackwardM256Tile


class Config(PairConfig):
    """The constants of the kernel with products of M = 128 over keys, and its five products."""

    tile: BackwardPairTile

    def __init__(self, key: KernelKey):
        super().__init__(key)
        tile = BACKWARD_TILES[key.head_dim, key.value_dim, key.pair]
        assert isinstance(tile, BackwardPairTile)
        self.tile = tile
        self.scores = products.Product(self.dtype, tile.n, tile.m, ctas=2)
        self.grads = products.Product(self.dtype, tile.n, tile.head_dim, ctas=2)
        self.dq = products.Product(self.dtype, tile.head_dim, tile.m, ctas=2)


class M256Config(PairConfig):
    """The constants of the kernel with products of M = 256 over keys, and its five products."""

    tile: BackwardM256Tile

    def __init__(self, key: KernelKey):
        super().__init__(key)
        tile = BACKWARD_TILES[key.head_dim, key.value_dim, key.pair]
        assert isinstance(tile, BackwardM256Tile)
        self.tile = tile
        self.scores = products.Product(self.dtype, tile.n, tile.m, ctas=2)
        self.dv = products.Product(self.dtype, tile.n, tile.value_dim, ctas=2)
        self.dk = products.Product(self.dtype, tile.n, tile.head_dim, ctas=2)
        lanes, columns = (2 * LANES, tile.m) if tile.dq_transposed else (tile.m, tile.head_dim)
        self.dq = products.Product(self.dtype, lanes, columns, ctas=2)
