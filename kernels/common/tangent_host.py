"""Host function of the tangent kernel; see `hosts`."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from fa4_jax.key import KernelKey, Pass
from kernels.common import hosts
from kernels.description import Description
from kernels.interface import BackwardScalars, HeadDims, Sizes, SmCount, TangentBuffers
from kernels.kernel_source import KernelSource


class TangentHost:
    """Launches a tangent kernel; a subclass sets the attributes and has `kernel`.

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
        buffers: TangentBuffers,
        sizes: Sizes,
        dims: HeadDims,
        scalars: BackwardScalars,
        device: SmCount,
        stream: cuda.CUstream,
    ):
        description = self.description
        shapes = hosts.buffer_shapes(sizes, dims)
        shapes |= {f"{name}_tangent": shapes[name] for name in ("q", "k", "v", "o")}
        maps = hosts.tensor_maps(description, self.dtype, hosts.all_pointers(buffers), shapes)
        tiles = cute.ceil_div(sizes.query_length, description.division.rows)
        tiles = tiles * sizes.heads * sizes.batch
        counters = ()
        if cutlass.const_expr(description.division.by_ticket):
            counters = (buffers.tile_ticket,)
        statistics = (buffers.extents, buffers.lse, buffers.lse_tangent)
        self.kernel(maps, *statistics, sizes, scalars, *counters).launch(
            grid=[cutlass.min(tiles, device.sm_count), 1, 1],
            block=[description.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )


TangentHost.__call__.set_name_prefix(f"{hosts.PREFIXES[Pass.TANGENT]}_host", **hosts.NAMED)


def tangent_source(host: TangentHost, key: KernelKey, tile: dict[str, int]) -> KernelSource:
    """Returns what the compiler needs of a tangent kernel; tile: sizes that the build prints."""
    takes = (TangentBuffers, Sizes, HeadDims, BackwardScalars, SmCount)
    return hosts.make_source(host, key, takes, tile)
