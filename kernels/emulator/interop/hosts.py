"""Host functions with arguments that CuTe-DSL can export: flash-attn-4's own take named tuples.

Imported only by a process that flash_attn4.prepare_process has readied.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute import runtime

ALIGNED_BYTES = 16


class Forward:
    """Launches a forward kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        output: cute.Tensor,
        lse: cute.Tensor,
        scale: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        self._kernel(query, key, value, output, lse, scale, stream=stream)


def forward_arguments() -> tuple[Any, ...]:
    """Stand-ins for what Forward takes, of any size."""
    arrays = [tensor(cutlass.BFloat16, 4) for _ in range(4)]
    return *arrays, tensor(cutlass.Float32, 3), cutlass.Float32(1), runtime.make_fake_stream()


def tensor(dtype: Any, rank: int) -> Any:
    """A tensor of any size whose last dimension is contiguous, at an aligned address."""
    elements = ALIGNED_BYTES * 8 // dtype.width
    shape = tuple(cute.sym_int() for _ in range(rank))
    strides = tuple(cute.sym_int64(divisibility=elements) for _ in range(rank - 1))
    return runtime.make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=ALIGNED_BYTES)


class Hardware:
    """Stands for cutlass.utils.HardwareInfo, which asks a driver."""

    multiprocessors = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def get_device_multiprocessor_count(self) -> int:
        """As `Variant` says."""
        return self.multiprocessors

    def get_max_active_clusters(self, cluster_size: int) -> int:
        """As many as fit."""
        return self.multiprocessors // cluster_size
