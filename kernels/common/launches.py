"""How each kernel family is launched: from a description to the manifest's record."""

from __future__ import annotations

from fa4_jax.key import KernelKey
from fa4_jax.manifest import Factor, Launch, Param, Result, Size
from kernels import interface
from kernels.description import Description

_ONE: Size = (Factor(),)


def forward(key: KernelKey, description: Description, rows: int, persistent: bool) -> Launch:
    """A forward kernel with tiles of `rows` query rows."""
    whole = ([Factor(description.ctas)]) if description.ctas > 1 else []
    return Launch(
        operands=("q", "k", "v", "extents"),
        results=(
            Result("o", key.dtype, (*_dims("q", (0, 1, 2)), *_dims("v", (3,)))),
            Result("lse", "f32", _dims("q", (0, 2, 1))),
        ),
        params=(
            *_maps(description),
            *_pointers("extents", "lse"),
            *interface.params(interface.Sizes),
            *interface.params(interface.ForwardScalars),
        ),
        grid=((*_tiles("q", rows), *whole), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
        cluster=(description.ctas, 1, 1),
        persistent=persistent,
    )


def backward(
    key: KernelKey,
    description: Description,
    keys: int,
    dq_tile: tuple[int, int],
    programmatic: bool,
) -> Launch:
    """A main backward kernel with tiles of `keys` keys, and of (rows, columns) of dQ."""
    counters = _counters(key)
    skipped = () if key.deterministic else ("dq_order", "dq_ticket")
    rows = [param for param in interface.params(interface.RowBuffers) if param.name not in skipped]
    return Launch(
        operands=("q", "k", "v", "do", "lse_log2", "delta", "extents", "dq_acc", *counters),
        results=(
            Result("dk", key.dtype, _dims("k", (0, 1, 2, 3))),
            Result("dv", key.dtype, _dims("v", (0, 1, 2, 3))),
            *_accumulators(*dq_tile, key),
        ),
        params=(
            *_maps(description),
            *rows,
            *interface.params(interface.Sizes),
            *interface.params(interface.BackwardScalars),
        ),
        grid=(_tiles("k", keys, description.ctas), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
        cluster=(description.ctas, 1, 1),
        programmatic=programmatic,
    )


def backward_pre(key: KernelKey, description: Description, rows: int, columns: int) -> Launch:
    """The kernel before the main one; dQ's tiles are rows x columns."""
    tiles = Factor(buffer="do", axis=1, divisor=rows, multiple=rows)
    padded = (*_dims("do", (0, 2)), (tiles,))
    skipped = () if key.deterministic else ("dq_order", "dq_ticket")
    buffers = interface.params(interface.PreBuffers)
    return Launch(
        operands=("o", "do", "lse", "dlse", "extents"),
        results=(
            Result("lse_log2", "f32", padded),
            Result("delta", "f32", padded),
            *_accumulators(rows, columns, key),
        ),
        params=(
            *(param for param in buffers if param.name not in skipped),
            *interface.params(interface.RowShape, "do")[1:],
        ),
        grid=(_tiles("do", rows), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
    )


def backward_post(
    key: KernelKey, description: Description, rows: int, programmatic: bool
) -> Launch:
    """The kernel after the main one; dQ's tiles have `rows` rows."""
    return Launch(
        operands=("q", "dq_acc"),
        results=(Result("dq", key.dtype, _dims("q", (0, 1, 2, 3))),),
        params=(
            *_maps(description),
            *_pointers("dq_acc"),
            *interface.params(interface.RowSizes, "q"),
            *interface.params(interface.PostScalars),
        ),
        grid=(_tiles("q", rows), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
        programmatic=programmatic,
    )


def _maps(description: Description) -> tuple[Param, ...]:
    """Tensor maps of [batch, length, heads, head_dim] buffers: boxes of one swizzle span."""
    return tuple(
        Param(
            f"{wanted.name}_map",
            "tensor_map",
            buffer=wanted.buffer,
            axes=(3, 1, 2, 0),
            box=(wanted.span_bytes // 2, wanted.rows, 1, 1),
            swizzle_bytes=wanted.span_bytes,
        )
        for wanted in description.maps
    )


def _pointers(*buffers: str) -> tuple[Param, ...]:
    return tuple(Param(buffer, "pointer", buffer=buffer) for buffer in buffers)


def _dims(buffer: str, axes: tuple[int, ...]) -> tuple[Size, ...]:
    """A result shape made of dimensions of one operand."""
    return tuple((Factor(buffer=buffer, axis=axis),) for axis in axes)


def _tiles(buffer: str, rows: int, ctas: int = 1) -> tuple[Factor, ...]:
    """CTAs: `ctas` for each tile of every head of a [batch, length, heads, columns] buffer."""
    return (
        Factor(buffer=buffer, axis=1, divisor=rows, multiple=ctas),
        Factor(buffer=buffer, axis=2),
        Factor(buffer=buffer, axis=0),
    )


def _counters(key: KernelKey) -> tuple[str, ...]:
    """What the backward of a key counts in global memory, to add dQ in order.

    dq_order: additions to each query tile; dq_ticket: CTAs, or pairs, that have started.
    """
    return ("dq_order", "dq_ticket") if key.deterministic else ()


def _accumulators(rows: int, columns: int, key: KernelKey) -> tuple[Result, ...]:
    """dQ's fp32 accumulators, in tiles of `rows` queries, and the counters of a key.

    The layout inside a tile is the backward kernel's own.
    """
    heads = ((Factor(buffer="do", axis=0),), (Factor(buffer="do", axis=2),))
    tiles = Factor(buffer="do", axis=1, divisor=rows)
    dq_acc = Result("dq_acc", "f32", (*heads, (tiles,), (Factor(rows * columns),)))
    shapes = {"dq_order": (*heads, (tiles,)), "dq_ticket": (_ONE,)}
    return (dq_acc, *(Result(name, "i32", shapes[name]) for name in _counters(key)))
