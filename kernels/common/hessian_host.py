"""Host function of the kernels of Hessian-vector products; see `hosts`."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from fa4_jax.key import KernelKey
from kernels.common import hosts
from kernels.description import Description
from kernels.interface import BackwardScalars, HeadDims, HessianBuffers, Sizes
from kernels.kernel_source import KernelSource


class HessianHost:
    """Launches a kernel of Hessian-vector products; a subclass sets the attributes and `kernel`.

    Attributes:
      description: of the kernel.
      dtype: storage type.
      by_key: a CTA has rows of keys, not of queries.
    """

    description: Description
    dtype: Any
    by_key: bool
    kernel: Any

    @cute.jit
    def __call__(
        self,
        buffers: HessianBuffers,
        sizes: Sizes,
        dims: HeadDims,
        scalars: BackwardScalars,
        stream: cuda.CUstream,
    ):
        description = self.description
        shapes = hosts.buffer_shapes(sizes, dims)
        shapes |= {f"{name}_tangent": shapes[name] for name in ("q", "k", "v", "dk", "dv")}
        shapes["dq_tangent"] = shapes["q"]
        maps = hosts.tensor_maps(description, self.dtype, hosts.all_pointers(buffers), shapes)
        division, length, heads = description.division, sizes.query_length, sizes.heads
        if cutlass.const_expr(self.by_key):
            length, heads = sizes.key_length, sizes.kv_heads
        tiles = cute.ceil_div(length, division.keys or division.rows) * heads
        pointers = (buffers.extents, buffers.row_statistics)
        self.kernel(maps, *pointers, sizes, scalars).launch(
            grid=[tiles * sizes.batch, 1, 1],
            block=[description.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )


HessianHost.__call__.set_name_prefix("fa4_hessian_host", **hosts.NAMED)


def hessian_source(host: HessianHost, key: KernelKey, tile: dict[str, int]) -> KernelSource:
    """Returns what the compiler needs of such a kernel; tile: sizes that the build prints."""
    takes = (HessianBuffers, Sizes, HeadDims, BackwardScalars)
    return hosts.make_source(host, key, takes, tile)
