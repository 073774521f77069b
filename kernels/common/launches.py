"""How each kernel is launched: `launch` makes the manifest's record from a description.

Nothing here needs CuTe-DSL.
"""

from __future__ import annotations

from fa4_jax.key import KernelKey, Pass
from fa4_jax.manifest import Factor, Launch, Param, Result, Size
from kernels import interface
from kernels.description import Description, Division

_ONE: Size = (Factor(),)


def launch(key: KernelKey, description: Description) -> Launch:
    """Returns how the kernel of a key is launched; the description is that kernel's."""
    families = {
        Pass.FORWARD: _forward,
        Pass.FORWARD_SPLIT: _forward_split,
        Pass.FORWARD_JOIN: _forward_join,
        Pass.TANGENT: _tangent,
        Pass.HESSIAN_QUERY: _hessian,
        Pass.HESSIAN_KEY: _hessian,
        Pass.BACKWARD_PRE: _backward_pre,
        Pass.BACKWARD: _backward,
        Pass.BACKWARD_POST: _backward_post,
        Pass.BIAS_GRADIENT: _bias_gradient,
    }
    return families[key.kernel](key, description)


def _forward(key: KernelKey, description: Description) -> Launch:
    whole = ([Factor(description.ctas)]) if description.ctas > 1 else []
    counters = ("tile_ticket",) if description.division.by_ticket else ()
    extra = interface.params(interface.PageBuffers) if key.paged else (*_ranges(key), *_bias(key))
    if key.ranges:
        skipped = () if key.reads_cap else ("soft_cap",)
        logits = interface.params(interface.LogitBuffers)
        extra += tuple(param for param in logits if param.name not in skipped)
    if key.sinks:
        extra += interface.params(interface.SinkBuffer)
    return Launch(
        operands=("q", "k", "v", "extents", *(p.buffer for p in extra if p.kind == "pointer")),
        results=(
            Result("o", key.dtype, (*_dims("q", (0, 1, 2)), *_dims("v", (3,)))),
            Result("lse", "f32", _dims("q", (0, 2, 1))),
            *([Result("max_logit", "f32", _dims("max_logit", (0, 1)))] if key.ranges else []),
            *(Result(name, "i32", (_ONE,), zeroed=True) for name in counters),
        ),
        params=(
            *_maps(description),
            *_pointers("extents", "lse"),
            *interface.params(interface.Sizes),
            *interface.params(interface.ForwardScalars),
            *_pointers(*counters),
            *extra,
        ),
        grid=((*_tiles("q", description.division.rows), *whole), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
        cluster=(description.ctas, 1, 1),
        persistent=description.division.persistent,
    )


def _forward_split(key: KernelKey, description: Description) -> Launch:
    parts = (*_dims("q", (0,)), *_dims("parts", (3,)), *_dims("q", (1,)))
    entries = (Factor(buffer="q", axis=0), Factor(buffer="parts", axis=4))
    absent = absent_of_split()
    of_keys = interface.PageBuffers if key.paged else interface.SplitRanges
    extra = tuple(p for p in interface.params(of_keys) if p.name not in absent)
    return Launch(
        operands=(
            *("q", "k", "v", "extents", "parts", "soft_cap", "sinks"),
            *(param.buffer for param in extra if param.kind == "pointer"),
        ),
        results=(
            Result("o_parts", "f32", (*parts, *_dims("q", (2,)), *_dims("v", (3,)))),
            Result("lse_parts", "f32", (*parts, *_dims("q", (2,)))),
            Result("max_parts", "f32", (*parts, *_dims("parts", (2,)))),
            Result("o", key.dtype, (entries, *_dims("q", (1, 2)), *_dims("v", (3,)))),
            Result("lse", "f32", (entries, *_dims("q", (2, 1)))),
            Result("row_max", "f32", (entries, *_dims("parts", (2,)), *_dims("q", (1,)))),
        ),
        params=(
            *_maps(description),
            *interface.params(interface.SplitBuffers),
            *interface.params(interface.Sizes),
            *interface.params(interface.HeadDims),
            *interface.params(interface.SplitShape),
            *interface.params(interface.SplitScalars),
            *extra,
        ),
        grid=(
            (Factor(buffer="q", axis=0), Factor(buffer="k", axis=2)),
            *_dims("parts", (0, 1)),
        ),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
    )


def absent_of_split() -> tuple[str, ...]:
    """Names what the split forward does not read of ranges: orders of tiles, masks of pairs."""
    return ("query_order", "key_order", *MASK)


def _forward_join(key: KernelKey, description: Description) -> Launch:
    return Launch(
        operands=("o_parts", "lse_parts", "max_parts", "extents", "sinks"),
        results=(
            Result("o", key.dtype, _dims("o_parts", (0, 2, 3, 4))),
            Result("lse", "f32", _dims("o_parts", (0, 3, 2))),
            Result("row_max", "f32", _dims("max_parts", (0, 3, 2))),
        ),
        params=(
            *interface.params(interface.JoinBuffers),
            *interface.params(interface.JoinShape)[1:],
        ),
        grid=(
            (Factor(buffer="o_parts", axis=0), Factor(buffer="o_parts", axis=3)),
            *_dims("o_parts", (2,)),
            _ONE,
        ),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
        programmatic=description.division.programmatic,
    )


def _tangent(key: KernelKey, description: Description) -> Launch:
    counters = ("tile_ticket",) if description.division.by_ticket else ()
    operands = ("q", "k", "v")
    tangents = tuple(f"{name}_tangent" for name in operands)
    return Launch(
        operands=(*operands, *tangents, "extents", "o", "lse"),
        results=(
            Result("o_tangent", key.dtype, _dims("o", (0, 1, 2, 3))),
            Result("lse_tangent", "f32", _dims("q", (0, 2, 1))),
            *(Result(name, "i32", (_ONE,), zeroed=True) for name in counters),
        ),
        params=(
            *_maps(description),
            *_pointers("extents", "lse", "lse_tangent"),
            *interface.params(interface.Sizes),
            *interface.params(interface.BackwardScalars),
            *_pointers(*counters),
        ),
        grid=(_tiles("q", description.division.rows), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
        persistent=1,
    )


def _hessian(key: KernelKey, description: Description) -> Launch:
    operands = ("q", "k", "v")
    tangents = tuple(f"{name}_tangent" for name in operands)
    of_keys = key.kernel is Pass.HESSIAN_KEY
    rows = description.division.keys if of_keys else description.division.rows
    results = ("k", "v") if of_keys else ("q",)
    return Launch(
        operands=(*operands, *tangents, "do", "extents", "row_statistics"),
        results=tuple(
            Result(f"d{name}_tangent", key.dtype, _dims(name, (0, 1, 2, 3))) for name in results
        ),
        params=(
            *_maps(description),
            *_pointers("extents", "row_statistics"),
            *interface.params(interface.Sizes),
            *interface.params(interface.BackwardScalars),
        ),
        grid=(_tiles(results[0], rows), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
    )


def _backward(key: KernelKey, description: Description) -> Launch:
    counters = counters_of(key.deterministic, description.division)
    skipped = absent_counters(counters)
    rows = [param for param in interface.params(interface.RowBuffers) if param.name not in skipped]
    cap = interface.params(interface.CapBuffer) if key.reads_cap else ()
    more = (*_ranges(key), *cap, *_bias(key))
    tail = ("tail", "tail_acc", "tail_parts") if description.division.splits_tail else ()
    most_ctas = MOST_TAIL_PARTS if description.division.splits_tail else description.ctas
    return Launch(
        operands=(
            *("q", "k", "v", "do", "lse_log2", "delta", "extents", "dq_acc", *counters),
            *(param.buffer for param in more if param.kind == "pointer"),
            *tail,
        ),
        results=(
            Result("dk", key.dtype, _dims("k", (0, 1, 2, 3))),
            Result("dv", key.dtype, _dims("v", (0, 1, 2, 3))),
            *_accumulators(key, description.division),
            *_tail_results(description.division),
        ),
        params=(
            *_maps(description),
            *rows,
            *interface.params(interface.Sizes),
            *interface.params(interface.BackwardScalars),
            *more,
            *_tail(description.division),
        ),
        grid=(_tiles("k", description.division.keys, most_ctas), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
        cluster=(description.ctas, 1, 1),
        persistent=description.division.persistent,
        programmatic=description.division.programmatic,
    )


def _backward_pre(key: KernelKey, description: Description) -> Launch:
    rows = description.division.rows
    tiles = Factor(buffer="do", axis=1, divisor=rows, multiple=rows)
    padded = (*_dims("do", (0, 2)), (tiles,))
    skipped = absent_counters(counters_of(key.deterministic, description.division))
    keys = () if "dq_cleared" in skipped else interface.params(interface.KeyHeads)
    buffers, tail = interface.params(interface.PreBuffers), _tail(description.division)
    return Launch(
        operands=("o", "do", "lse", "dlse", "extents", *_names(keys, "k"), *_names(tail, "tail")),
        results=(
            Result("lse_log2", "f32", padded),
            Result("delta", "f32", padded),
            *_accumulators(key, description.division),
            *_tail_results(description.division),
        ),
        params=(
            *(param for param in buffers if param.name not in skipped),
            *interface.params(interface.RowShape, "do")[1:],
            *keys,
            *tail,
            *(interface.params(interface.TailSizes) if tail else ()),
        ),
        grid=(_tiles("do", rows), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
    )


def _names(params: tuple[Param, ...], operand: str) -> tuple[str, ...]:
    """Names an operand of which only the shape is read, if anything reads it."""
    return (operand,) if params else ()


def _backward_post(key: KernelKey, description: Description) -> Launch:
    order = interface.params(interface.PostOrder) if description.division.stores_first else ()
    return Launch(
        operands=("q", "extents", "dq_acc", *_names(order, "dq_order")),
        results=(Result("dq", key.dtype, _dims("q", (0, 1, 2, 3))),),
        params=(
            *_maps(description),
            *_pointers("extents", "dq_acc"),
            *interface.params(interface.RowSizes, "q"),
            *interface.params(interface.PostScalars),
            *order,
        ),
        grid=(_tiles("q", description.division.rows), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
        programmatic=description.division.programmatic,
    )


def _bias_gradient(key: KernelKey, description: Description) -> Launch:
    del key
    division = description.division
    counters = ("tile_ticket",) if division.by_ticket else ()
    buffers = interface.params(interface.BiasGradientBuffers)
    return Launch(
        operands=(*("q", "k", "v", "do", "extents", "lse_log2", "delta", "bias", "dbias_shape"),),
        results=(
            Result("dbias", "f32", _dims("dbias_shape", (1, 2, 3, 4))),
            *(Result(name, "i32", (_ONE,), zeroed=True) for name in counters),
        ),
        params=(
            *_maps(description),
            *(param for param in buffers if division.by_ticket or param.name != "tile_ticket"),
            *interface.params(interface.Sizes),
            *interface.params(interface.BiasGradientShape),
            *interface.params(interface.BackwardScalars),
            *interface.params(interface.BiasBuffers),
        ),
        grid=(tuple(Factor(buffer="dbias_shape", axis=axis) for axis in (1, 2, 5)), _ONE, _ONE),
        block=(description.threads, 1, 1),
        dynamic_smem_bytes=description.shared_bytes,
        persistent=division.persistent,
    )


def _maps(description: Description) -> tuple[Param, ...]:
    """Lists the tensor maps of [batch, length, heads, head_dim] buffers.

    A box is a swizzle span wide.
    """
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


def _ranges(key: KernelKey) -> tuple[Param, ...]:
    """Lists the parameters of ranges in memory, where a key has them."""
    if not key.ranges:
        return ()
    skipped = absent_orders(forward=key.kernel is Pass.FORWARD, deterministic=key.deterministic)
    skipped += () if key.reads_mask else MASK
    return tuple(p for p in interface.params(interface.RangeBuffers) if p.name not in skipped)


def _bias(key: KernelKey) -> tuple[Param, ...]:
    """Lists the parameters of a bias in memory, where a key has one."""
    return interface.params(interface.BiasBuffers) if key.bias else ()


MASK = ("mask_batch", "mask_heads", "state_heads", "mask_bits", "mask_some", "mask_every")
"""What a kernel that reads no bits of masks lacks of the buffers of ranges."""


def absent_orders(*, forward: bool, deterministic: bool) -> tuple[str, ...]:
    """Names the orders of tiles that a kernel with ranges does not read."""
    if forward:
        return ("key_order",)
    # Tiles that add in a fixed order start in that order: kernels/sm90/backward_dq.py.
    return ("query_order", "key_order") if deterministic else ("query_order",)


def _dims(buffer: str, axes: tuple[int, ...]) -> tuple[Size, ...]:
    """Returns a result's shape that consists of dimensions of one operand."""
    return tuple((Factor(buffer=buffer, axis=axis),) for axis in axes)


def _tiles(buffer: str, rows: int, ctas: int = 1) -> tuple[Factor, ...]:
    """Counts CTAs: `ctas` a tile, of every head of a [batch, length, heads, columns] buffer."""
    return (
        Factor(buffer=buffer, axis=1, divisor=rows, multiple=ctas),
        Factor(buffer=buffer, axis=2),
        Factor(buffer=buffer, axis=0),
    )


def counters_of(deterministic: bool, division: Division) -> tuple[str, ...]:
    """Names what the backward of a key counts in global memory.

    dq_order counts additions to each query tile, which are in order; dq_ticket the key tiles that
    CTAs, or pairs, have taken; dq_cleared the shares of a section's dQ that are 0.
    """
    order = ("dq_order",) if deterministic else ()
    ticket = ("dq_ticket",) if deterministic or division.by_ticket else ()
    return (*order, *ticket, *(("dq_cleared",) if division.cleared_bytes > 0 else ()))


def absent_counters(counters: tuple[str, ...]) -> tuple[str, ...]:
    """Names the counters that a backward lacks."""
    return tuple(name for name in ("dq_order", "dq_ticket", "dq_cleared") if name not in counters)


MOST_TAIL_PARTS = 16
"""CTAs that are started for a tile at most, where CTAs share the last tiles."""


def _tail(division: Division) -> tuple[Param, ...]:
    """Lists the parameters of the buffers in which parts of tiles meet."""
    return interface.params(interface.TailBuffers) if division.splits_tail else ()


def _tail_results(division: Division) -> tuple[Result, ...]:
    """Returns these buffers, which have as many tiles as the operand `tail` says."""
    if not division.splits_tail:
        return ()
    tiles, size = _dims("tail", (0,)), 2 * division.keys * division.columns
    return (
        Result("tail_acc", "f32", (*tiles, (Factor(size),))),
        Result("tail_parts", "i32", tiles),
    )


def _accumulators(key: KernelKey, division: Division) -> tuple[Result, ...]:
    """Returns the results for dQ's fp32 accumulators, tile by tile, and for the counters of a key.

    The layout inside a tile is the backward kernel's own.
    """
    heads = ((Factor(buffer="do", axis=0),), (Factor(buffer="do", axis=2),))
    tiles = Factor(buffer="do", axis=1, divisor=division.rows)
    tile_size = division.rows * division.columns
    dq_acc = Result("dq_acc", "f32", (*heads, (tiles,), (Factor(tile_size),)))
    shapes = {"dq_order": (*heads, (tiles,)), "dq_ticket": (_ONE,), "dq_cleared": heads}
    return (
        dq_acc,
        *(Result(name, "i32", shapes[name]) for name in counters_of(key.deterministic, division)),
    )
