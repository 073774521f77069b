"""Host function of the kernel of a bias's gradient; see `hosts`."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute

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
)


class BiasGradientHost:
    """Launches the kernel; a subclass sets the attributes and has `kernel`.

    Attributes:
      description: of the kernel.
      dtype: storage type.
      ctas: that one multiprocessor holds at a time.
    """

    description: Description
    ctas: int
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
        stream: cuda.CUstream,
    ):
        shapes = hosts.buffer_shapes(sizes, dims)
        maps = hosts.tensor_maps(self.description, self.dtype, hosts.all_pointers(loads), shapes)
        self.kernel(maps, buffers, sizes, shape, scalars, bias).launch(
            grid=[bias.bias_batch * bias.bias_heads * shape.units, 1, 1],
            block=[self.description.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=100,  # Without it the compiler asks a GPU, and none is there.
        )


BiasGradientHost.__call__.set_name_prefix("fa4_bias_grad_host", **hosts.NAMED)
