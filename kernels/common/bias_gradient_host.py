"""Host function of the kernel of a bias's gradient; see `hosts`."""

import dataclasses
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from fa4_jax.key import BIAS_GRADIENT_TILES, KernelKey
from kernels.common import hosts
from kernels.description import Description
from kernels.interface import (
    BackwardScalars,
    BiasBuffers,
    BiasGradientBuffers,
    BiasGradientLoads,
    BiasGradientShape,
    HeadDims,
    Sizes,
    SmCount,
)
from kernels.kernel_source import KernelSource


class BiasGradientHost:
    """Launches the kernel; a subclass sets the attributes and has `kernel`.

    Attributes:
      description: of the kernel.
      dtype: storage type.
    """

    description: Description
    dtype: Any
    kernel: Any

    @cute.jit
    def __call__(
        self,
        loads: BiasGradientLoads,
        buffers: BiasGradientBuffers,
        sizes: Sizes,
        dims: HeadDims,
        shape: BiasGradientShape,
        scalars: BackwardScalars,
        bias: BiasBuffers,
        device: SmCount,
        stream: cuda.CUstream,
    ):
        division, shapes = self.description.division, hosts.buffer_shapes(sizes, dims)
        maps = hosts.tensor_maps(self.description, self.dtype, hosts.all_pointers(loads), shapes)
        tiles = bias.bias_batch * bias.bias_heads * shape.units
        if cutlass.const_expr(division.persistent):
            tiles = cutlass.min(tiles, device.sm_count)
        if cutlass.const_expr(not division.by_ticket):
            buffers = dataclasses.replace(buffers, tile_ticket=None)
        self.kernel(maps, buffers, sizes, shape, scalars, bias).launch(
            grid=[tiles, 1, 1],
            block=[self.description.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # Without it the compiler asks a GPU, and none is there.
        )


BiasGradientHost.__call__.set_name_prefix("fa4_bias_grad_host", **hosts.NAMED)


def bias_gradient_source(kernel: Any, key: KernelKey) -> KernelSource:
    """Returns a kernel with its launch."""
    takes = (
        *(BiasGradientLoads, BiasGradientBuffers, Sizes, HeadDims),
        *(BiasGradientShape, BackwardScalars, BiasBuffers, SmCount),
    )
    tile = BIAS_GRADIENT_TILES[key.arch]
    return hosts.make_source(kernel, key, takes, {"m": tile, "n": tile})
