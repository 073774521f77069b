"""Words for describing a kernel's launch, shared by all kernel families."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_ptr

from fa4_jax.key import KernelKey
from fa4_jax.manifest import Factor, Param, Result, Size
from kernels.common.tensors import TYPES

BUFFER_TYPES = {"extents": Int32, "dq_order": Int32, "dq_ticket": Int32} | dict.fromkeys(
    ("lse", "dlse", "lse_log2", "delta", "dq_acc"), Float32
)
"""Element types of the buffers that are not stored in the key's dtype."""

ONE: Size = (Factor(),)


def buffer_type(buffer: str, dtype: str) -> type[cutlass.Numeric]:
    """Element type of a buffer of a kernel whose storage type is `dtype`."""
    return BUFFER_TYPES.get(buffer, TYPES[dtype])


def bthd_map(buffer: str, rows: int, span_bytes: int, name: str = "") -> Param:
    """Tensor map of a [B, length, heads, head_dim] buffer: boxes of `rows` by one swizzle span."""
    return Param(
        name or f"{buffer}_map",
        "tensor_map",
        buffer=buffer,
        axes=(3, 1, 2, 0),
        box=(span_bytes // 2, rows, 1, 1),
        swizzle_bytes=span_bytes,
    )


def pointers(*buffers: str) -> tuple[Param, ...]:
    """A pointer parameter for each buffer."""
    return tuple(Param(buffer, "pointer", buffer=buffer) for buffer in buffers)


def dim(name: str, buffer: str, axis: int) -> Param:
    """A parameter that is one dimension of a buffer."""
    return Param(name, "dim", buffer=buffer, axes=(axis,))


SIZES = (
    dim("batch", "q", 0),
    dim("query_length", "q", 1),
    dim("key_length", "k", 1),
    dim("heads", "q", 2),
    dim("kv_heads", "k", 2),
)
"""The sizes that the forward and the main backward kernel take, in order."""


def scalars(kind: str, *names: str) -> tuple[Param, ...]:
    """Parameters that are FFI attributes; kind is "i32" or "f32"."""
    return tuple(Param(name, kind) for name in names)


def dims(buffer: str, axes: tuple[int, ...]) -> tuple[Size, ...]:
    """A result shape made of dimensions of one operand."""
    return tuple((Factor(buffer=buffer, axis=axis),) for axis in axes)


def counters(key: KernelKey) -> tuple[str, ...]:
    """What the backward of a key counts in global memory, to add dQ in order.

    dq_order: additions to each query tile; dq_ticket: CTAs, or pairs, that have started.
    """
    return ("dq_order", "dq_ticket") if key.deterministic else ()


def accumulators(rows: int, head_dim: int, key: KernelKey) -> tuple[Result, ...]:
    """dQ's fp32 accumulators, in tiles of `rows` queries, and the counters of a key.

    The layout inside a tile is the backward kernel's own; `q` must be an operand or `do`, its like.
    """
    heads = ((Factor(buffer="do", axis=0),), (Factor(buffer="do", axis=2),))
    tiles = Factor(buffer="do", axis=1, divisor=rows)
    dq_acc = Result("dq_acc", "f32", (*heads, (tiles,), (Factor(rows * head_dim),)))
    shapes = {"dq_order": (*heads, (tiles,)), "dq_ticket": (ONE,)}
    return (dq_acc, *(Result(name, "i32", shapes[name]) for name in counters(key)))


def example_arguments(params: tuple[Param, ...], dtype: str) -> tuple:
    """Arguments of the right types for cute.compile, the stream last."""
    arguments: list = []
    for param in params:
        if param.kind == "pointer":
            element = buffer_type(param.buffer, dtype)
            arguments.append(make_ptr(element, 0, cute.AddressSpace.gmem, assumed_align=16))
        elif param.kind == "f32":
            arguments.append(Float32(1.0))
        else:
            arguments.append(Int32(1))
    return (*arguments, make_fake_stream())


def await_launch_before():
    """What a programmatic launch does before it touches global memory, by all threads.

    It waits until the launch before it is over and all results of earlier ones are there, and lets
    the one behind it start: its CTAs take the places that this one's leave.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
