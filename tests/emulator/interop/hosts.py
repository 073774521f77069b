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


class Preprocess:
    """Launches what comes before the backward: row sums of O dO, LSE in base 2, zeroes for dQ."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @cute.jit
    def __call__(
        self,
        output: cute.Tensor,
        output_bar: cute.Tensor,
        row_sums: cute.Tensor,
        lse: cute.Tensor,
        lse_log2: cute.Tensor,
        dq_sums: cute.Tensor,
        scale: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        self._kernel(
            output,
            output_bar,
            row_sums,
            lse,
            lse_log2,
            dq_sums,
            None,
            None,
            None,
            None,
            None,
            scale,
            stream=stream,
        )


class Backward:
    """Launches a backward kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        output_bar: cute.Tensor,
        lse_log2: cute.Tensor,
        row_sums: cute.Tensor,
        dq_sums: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        self._kernel(
            query,
            key,
            value,
            output_bar,
            lse_log2,
            row_sums,
            dq_sums,
            dk,
            dv,
            scale,
            stream=stream,
        )


class RowSums:
    """Launches what comes before the two kernels of head dim 256: row sums of O dO, LSE in base 2.

    The same kernel as `Preprocess`'s, without sums of dQ.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @cute.jit
    def __call__(
        self,
        output: cute.Tensor,
        output_bar: cute.Tensor,
        row_sums: cute.Tensor,
        lse: cute.Tensor,
        lse_log2: cute.Tensor,
        scale: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        absent = (None,) * 6
        self._kernel(output, output_bar, row_sums, lse, lse_log2, *absent, scale, stream=stream)


class QueryGradient:
    """Launches dQ's kernel of head dim 256, one query head to a key head."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        output_bar: cute.Tensor,
        lse_log2: cute.Tensor,
        row_sums: cute.Tensor,
        dq: cute.Tensor,
        scale: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        absent = (None,) * 4
        self._kernel(
            grouped(query),
            grouped(key),
            grouped(value),
            grouped(dq),
            grouped(output_bar),
            grouped_rows(lse_log2),
            grouped_rows(row_sums),
            *absent,
            scale,
            None,
            stream,
        )


class KeyValueGradient:
    """Launches dK's and dV's kernel of head dim 256, one query head to a key head."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        output_bar: cute.Tensor,
        lse_log2: cute.Tensor,
        row_sums: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        absent = (None,) * 4
        self._kernel(
            grouped(query),
            grouped(key),
            grouped(value),
            grouped(dk),
            grouped(dv),
            grouped(output_bar),
            grouped_rows(lse_log2),
            grouped_rows(row_sums),
            *absent,
            scale,
            None,
            stream,
        )


def grouped(tensor: Any) -> cute.Tensor:
    """[B, T, N, H] as [B, T, N, 1, H], its outer strides multiples of ALIGNED_BYTES."""
    elements = ALIGNED_BYTES * 8 // tensor.element_type.width
    batch, row, head = (cute.assume(step, divby=elements) for step in tensor.stride[:3])
    b, t, n, h = tensor.shape
    layout = cute.make_layout((b, t, n, 1, h), stride=(batch, row, head, head, 1))
    return cute.make_tensor(tensor.iterator, layout)


def grouped_rows(tensor: Any) -> cute.Tensor:
    """[B, N, T] as [T, [[1, N], B]]."""
    batch, head, _ = tensor.stride
    b, n, t = tensor.shape
    layout = cute.make_layout((t, ((1, n), b)), stride=(1, ((head, head), batch)))
    return cute.make_tensor(tensor.iterator, layout)


class Postprocess:
    """Launches what turns sums of dQ into dQ."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @cute.jit
    def __call__(
        self,
        dq_sums: cute.Tensor,
        dq: cute.Tensor,
        scale: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        self._kernel(dq_sums, dq, scale, None, None, None, stream=stream)


def arguments(host: Any) -> tuple[Any, ...]:
    """Stand-ins for what a host function takes, of any size."""
    bf16, f32 = cutlass.BFloat16, cutlass.Float32
    per_head = [(bf16, 4, ALIGNED_BYTES)]
    aligned, unaligned = [(f32, 3, ALIGNED_BYTES)], [(f32, 3, 4)]
    kinds = {
        Forward: per_head * 4 + unaligned,
        Preprocess: per_head * 2 + aligned + unaligned + aligned * 2,
        Backward: per_head * 4 + aligned * 3 + per_head * 2,
        Postprocess: aligned + per_head,
        RowSums: per_head * 2 + aligned + unaligned + aligned,
        QueryGradient: per_head * 4 + aligned * 2 + per_head,
        KeyValueGradient: per_head * 4 + aligned * 2 + per_head * 2,
    }
    tensors = [tensor(*kind) for kind in kinds[type(host)]]
    return *tensors, f32(1), runtime.make_fake_stream()


def tensor(dtype: Any, rank: int, aligned_bytes: int) -> Any:
    """A tensor of any size whose last dimension is contiguous, its rows aligned."""
    elements = aligned_bytes * 8 // dtype.width
    shape = tuple(cute.sym_int() for _ in range(rank))
    strides = tuple(cute.sym_int64(divisibility=elements) for _ in range(rank - 1))
    return runtime.make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=aligned_bytes)


class Hardware:
    """Stands for cutlass.utils.HardwareInfo, which asks a driver."""

    multiprocessors = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def get_device_multiprocessor_count(self) -> int:
        """The number that `Variant` gives."""
        return self.multiprocessors

    def get_max_active_clusters(self, cluster_size: int) -> int:
        """The number of clusters that fit."""
        return self.multiprocessors // cluster_size
