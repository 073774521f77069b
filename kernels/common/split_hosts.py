"""Host functions of the split forward and of the kernel that joins its parts; see `hosts`."""

import dataclasses
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from fa4_jax.key import SPLIT_CTAS, KernelKey, Pass
from kernels.common import hosts, launches
from kernels.description import Description
from kernels.interface import (
    HeadDims,
    JoinBuffers,
    JoinShape,
    PageBuffers,
    Sizes,
    SplitBuffers,
    SplitLoads,
    SplitRanges,
    SplitScalars,
    SplitShape,
)
from kernels.kernel_source import KernelSource


class SplitHost:
    """Launches a split forward; a subclass sets the attributes and has `kernel`.

    Attributes:
      description: of the kernel.
      dtype: storage type.
      ctas: that a multiprocessor holds at a time.
      paged: K and V lie in pages.
    """

    description: Description
    dtype: Any
    ctas: int
    paged: bool
    kernel: Any

    @cute.jit
    def __call__(
        self,
        loads: SplitLoads,
        buffers: SplitBuffers,
        sizes: Sizes,
        dims: HeadDims,
        parts: SplitShape,
        scalars: SplitScalars,
        of_keys: PageBuffers | SplitRanges,
        stream: cuda.CUstream,
    ):
        shapes = hosts.buffer_shapes(sizes, dims)
        if cutlass.const_expr(self.paged):
            shapes |= hosts.of_pages(of_keys, sizes, dims)
        maps = hosts.tensor_maps(self.description, self.dtype, hosts.all_pointers(loads), shapes)
        if cutlass.const_expr(not self.paged):
            of_keys = dataclasses.replace(of_keys, **dict.fromkeys(launches.absent_of_split()))
        self.kernel(maps, buffers, sizes, dims, parts, scalars, of_keys).launch(
            grid=[sizes.batch * sizes.kv_heads, parts.splits, parts.row_blocks],
            block=[self.description.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=100,  # Without it the compiler asks a GPU, and none is there.
        )


class JoinHost:
    """Launches a kernel that joins parts; a subclass sets `description` and has `kernel`."""

    description: Description
    kernel: Any

    @cute.jit
    def __call__(self, buffers: JoinBuffers, shape: JoinShape, stream: cuda.CUstream):
        self.kernel(buffers, dataclasses.replace(shape, batch=None)).launch(
            grid=[shape.heads * shape.batch, shape.query_length, 1],
            block=[self.description.threads, 1, 1],
            stream=stream,
            use_pdl=self.description.division.programmatic,
        )


for _host, _pass in ((SplitHost, Pass.FORWARD_SPLIT), (JoinHost, Pass.FORWARD_JOIN)):
    _host.__call__.set_name_prefix(f"{hosts.PREFIXES[_pass]}_host", **hosts.NAMED)


def split_source(host: SplitHost, key: KernelKey) -> KernelSource:
    """Returns what the compiler needs of a split forward."""
    division = host.description.division
    stages = host.description.barrier("kv_full").count
    tile = {"m": division.rows, "n": division.keys, "kv_stages": stages}
    takes = (
        *(SplitLoads, SplitBuffers, Sizes, HeadDims, SplitShape, SplitScalars),
        PageBuffers if host.paged else SplitRanges,
    )
    return hosts.make_source(host, key, takes, tile | {"ctas": SPLIT_CTAS[key.head_dim]})


def join_source(host: JoinHost, key: KernelKey) -> KernelSource:
    """Returns what the compiler needs of a kernel that joins parts."""
    return hosts.make_source(host, key, (JoinBuffers, JoinShape), {"m": 1})
