"""Attention by kernel launches: one or two for the forward, three or four for the backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fa4_jax import bias_buffer, ffi_call, mesh_types
from fa4_jax.group_split import group_split
from fa4_jax.key import BIAS_GRADIENT_TILES, MAY_LACK_RANGES, Pass
from fa4_jax.masks import bits as packed
from fa4_jax.masks import order, table
from fa4_jax.operands import (
    Cotangents,
    Direction,
    Gradients,
    MaskBits,
    Operands,
    Results,
    RowRanges,
    Tags,
    Tangents,
)
from fa4_jax.plan import Kernel, Plan, in_memory, scalars
from fa4_jax.problem import Problem
from fa4_jax.row_statistics import row_statistics


def _run(
    kernels: tuple[Kernel, ...], problem: Problem, buffers: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    numbers = scalars(problem)
    for together in _calls(kernels):
        buffers = buffers | ffi_call.launch(together, buffers, numbers)
    return buffers


def _calls(kernels: tuple[Kernel, ...]) -> list[list[Kernel]]:
    """Kernels by calls: one that may start while the one before it ends shares its call."""
    calls: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.launch.programmatic:
            calls[-1].append(kernel)
        else:
            calls.append([kernel])
    return calls


def _whole(problem: Problem) -> RowRanges:
    """Ranges of rows that see every key."""
    lows = jnp.zeros((1, table.tiles(problem.query_length)), jnp.int32)
    highs = jnp.full_like(lows, problem.key_length)
    low = jnp.zeros((1, problem.query_length), jnp.int32)
    high = jnp.full_like(low, problem.key_length)
    return RowRanges(low, high, jnp.stack((lows, highs, lows, highs), axis=-1))


def range_buffers(rows: RowRanges) -> dict[str, jax.Array]:
    """The buffers of ranges; without tags no tile compares them, whatever their buffers hold."""
    tags = rows.tags
    if tags is None:
        tags = Tags(rows.low, rows.low, rows.low, jnp.zeros_like(rows.table[..., 0]))
    return {
        "row_low": rows.low,
        "row_high": rows.high,
        "row_table": rows.table,
        "tag_low": tags.query_low,
        "tag_high": tags.query_high,
        "tag_key": tags.key,
        "tag_tiles": tags.tiles,
    }


def mask_buffers(bits: MaskBits | None, kernel: Kernel, kv_heads: int = 0) -> dict[str, jax.Array]:
    """The buffers of a mask of pairs, which are empty where there is none.

    kv_heads: of a backward, which asks about all heads of a group together.
    """
    if not kernel.key.reads_mask:
        return {}
    if bits is None:
        nothing = jnp.zeros((1, 0, 1, 1), jnp.int32)
        return {"mask_bits": nothing[..., None], "mask_some": nothing, "mask_every": nothing}
    if kv_heads:
        bits = packed.of_groups(bits, kv_heads)
    return {"mask_bits": bits.words, "mask_some": bits.some, "mask_every": bits.every}


def _tile_size(kernel: Kernel) -> int:
    """Query rows of a forward's tile, keys of a backward's: the grid counts these tiles."""
    return kernel.launch.grid[0][0].divisor


def forward_buffers(problem: Problem, operands: Operands, kernel: Kernel) -> dict[str, jax.Array]:
    """What a forward takes beside q, k, v and extents, where it reads anything else from memory.

    `max_logit` is raised by the kernel; where nobody wants it, it is empty.
    """
    if problem.bias is not None:
        return {"bias": bias_buffer.buffer(operands.bias, kernel.key)}
    if kernel.key.sinks:
        assert operands.sinks is not None
        return {"sinks": operands.sinks.astype(jnp.float32)}
    if not kernel.key.ranges:
        return {}
    tile = _tile_size(kernel)
    bits = operands.bits
    if (rows := operands.rows) is None and bits is None:
        rows, tiles = _whole(problem), order.descending(problem.query_length, tile)
        if kernel.key.arch in MAY_LACK_RANGES:
            rows, tiles = jax.tree.map(lambda x: x[:0], (rows, tiles))
    else:
        rows = _narrowed(_whole(problem) if rows is None else rows, bits)
        keys = None if bits is None else packed.keys_of_tiles(bits, tile)
        tiles = order.of_queries(rows, problem.window, operands.extents, tile, keys)
    sinks = jnp.zeros(0) if operands.sinks is None else operands.sinks
    heads = problem.query_heads if problem.returns_max_logit else 0
    buffers = {
        **range_buffers(rows),
        **mask_buffers(bits, kernel),
        "query_order": tiles,
        "sinks": sinks.astype(jnp.float32),
        "max_logit": jnp.full((problem.batch, heads), -jnp.inf, jnp.float32),
    }
    cap = problem.soft_cap if operands.soft_cap is None else operands.soft_cap
    return _varying({**buffers, "soft_cap": _soft_cap(cap)}, operands)


def split_buffers(problem: Problem, operands: Operands) -> dict[str, jax.Array]:
    """What a split forward takes beside q, k, v, extents and `parts`.

    Arrays of what the call does not have are without elements: then nothing is read.
    """
    cap = problem.soft_cap if operands.soft_cap is None else operands.soft_cap
    sinks = jnp.zeros(0) if operands.sinks is None else operands.sinks
    buffers = {
        "soft_cap": jnp.zeros(0, jnp.float32) if cap is None else _soft_cap(cap),
        "sinks": sinks.astype(jnp.float32),
    }
    if problem.page_length is None:
        rows = operands.rows
        if rows is None:
            none = jnp.zeros((1, 0), jnp.int32)
            rows = RowRanges(none, none, none[..., None])
        buffers |= range_buffers(rows)
    return _varying(buffers, operands)


def _soft_cap(cap: float | jax.Array | None) -> jax.Array:
    """The soft cap as kernels read it: a kernel for calls with and without one takes 0 for none."""
    return jnp.full(1, 0.0 if cap is None else cap, jnp.float32)


def _varying(buffers: dict[str, jax.Array], operands: Operands) -> dict[str, jax.Array]:
    """The buffers, which vary over all mesh axes over which any operand does."""
    axes = mesh_types.union_varying(operands)
    return {name: mesh_types.cast_varying(x, axes) for name, x in buffers.items()}


def forward(plan: Plan, operands: Operands, page_table: jax.Array | None = None) -> Results:
    """Output [B, T, N, H], log-sum-exp [B, N, T] f32, largest scores, as `xla.forward`.

    page_table: int32 [B, M], where a problem has pages; key and value are then [P, page_length, K,
    H]. Key j of entry b is row j % page_length of page page_table[b, j // page_length]. A number of
    no page counts as the nearest one's; entries past the key length are not read.
    """
    problem, parts = plan.problem, plan.parts
    buffers = {
        "q": operands.query,
        "k": operands.key,
        "v": operands.value,
        "extents": operands.extents,
    }
    if page_table is not None:
        buffers["page_table"] = page_table
    if parts is None:
        buffers |= forward_buffers(problem, operands, plan.forward[0])
    else:
        buffers |= _varying({"parts": jnp.zeros(parts, jnp.int32)}, operands)
        buffers |= split_buffers(problem, operands)
    results = _run(plan.forward_launches, problem, buffers)
    if not problem.returns_max_logit:
        return Results(results["o"], results["lse"], None)
    largest = results["max_logit"] if parts is None else results["row_max"].max(axis=-1)
    return Results(results["o"], results["lse"], largest)


def tangent(plan: Plan, operands: Operands, direction: Direction) -> Results:
    """Tangents of output [B, T, N, H] and log-sum-exp [B, N, T], as `xla.tangent`."""
    buffers = {
        "q": operands.query,
        "k": operands.key,
        "v": operands.value,
        "q_tangent": direction.query,
        "k_tangent": direction.key,
        "v_tangent": direction.value,
        "extents": operands.extents,
        "o": direction.output,
        "lse": direction.lse,
    }
    results = _run(plan.tangent, plan.problem, buffers)
    return Results(results["o_tangent"], results["lse_tangent"])


def hessian(
    plan: Plan, operands: Operands, cotangents: Cotangents, tangents: Tangents
) -> Gradients:
    """How gradients of query, key and value move with operands and results, as `xla.hessian`."""
    buffers = {
        "q": operands.query,
        "k": operands.key,
        "v": operands.value,
        "q_tangent": tangents.query,
        "k_tangent": tangents.key,
        "v_tangent": tangents.value,
        "do": cotangents.output_bar,
        "extents": operands.extents,
        "row_statistics": row_statistics(
            jnp,
            (cotangents.output, cotangents.lse),
            (cotangents.output_bar, cotangents.lse_bar),
            (tangents.output, tangents.lse),
        ),
    }
    found = _run(plan.hessian, plan.problem, buffers)
    return Gradients(found["dq_tangent"], found["dk_tangent"], found["dv_tangent"], None)


def backward_buffers(problem: Problem, operands: Operands, kernel: Kernel) -> dict[str, jax.Array]:
    """What a backward takes beside the buffers of every call, where it reads ranges.

    kernel: the main one.
    """
    if problem.bias is not None:
        bias = bias_buffer.buffer(operands.bias, kernel.key)
        is_banded = problem.bias == "banded"
        tile = BIAS_GRADIENT_TILES[kernel.key.arch]
        shape = bias_buffer.gradient_shape(bias.shape, _lengths(problem), tile, is_banded)
        return {"bias": bias, "dbias_shape": jnp.zeros(shape, jnp.int32)}
    if not in_memory(problem, Pass.BACKWARD):
        return {}
    tile, keys, bits = _tile_size(kernel), problem.key_length, operands.bits
    if (rows := operands.rows) is None and bits is None:
        rows, tiles = _whole(problem), order.ascending(keys, tile)
    else:
        rows = _narrowed(_whole(problem) if rows is None else rows, bits)
        count = table.tiles(keys, tile)
        visitors = None if bits is None else packed.rows_of_tiles(bits, tile, count)
        own = order.Tiles(tile, keys, visitors)
        tiles = order.of_keys(rows, problem.window, operands.extents, own)
    return {
        **range_buffers(rows),
        **mask_buffers(bits, kernel, problem.kv_heads),
        "soft_cap": _soft_cap(problem.soft_cap),
        "key_order": tiles,
    }


def _narrowed(rows: RowRanges, bits: MaskBits | None) -> RowRanges:
    """Ranges whose tile table says what is visited by a mask of pairs, too."""
    if bits is None:
        return rows
    found = packed.narrowed(rows.table, bits)
    batch = found.shape[0]
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), rows)
    return rows._replace(table=found)


def _of_own_keys(problem: Problem, rows: RowRanges | None, lse: jax.Array) -> jax.Array:
    """The log-sum-exp [B, N, T], -inf where a row's range is empty, although it has a sink.

    Kernels mask no such row in a block that all other rows of its tile see: its P is 0 by its LSE.
    """
    if rows is None or not problem.has_sinks:
        return lse
    return jnp.where((rows.low < rows.high)[:, None, :], lse, -jnp.inf)


def backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of query, key and value, as `xla.backward`."""
    split = group_split(plan)
    operands = split.divide(operands)
    buffers = {
        "q": operands.query,
        "k": operands.key,
        "v": operands.value,
        "extents": operands.extents,
        "o": cotangents.output,
        "lse": _of_own_keys(plan.problem, operands.rows, cotangents.lse),
        "do": cotangents.output_bar,
        "dlse": cotangents.lse_bar,
    }
    # What the kernel before the main one counts, if the order is fixed.
    buffers |= _varying({"dq_order": jnp.zeros((0, 0, 0), jnp.int32)}, operands)
    main = plan.backward[1]
    if (shape := split.plan.tail_shape) is not None:
        buffers |= _varying({"tail": jnp.zeros(shape, jnp.int32)}, operands)
    buffers |= _varying(backward_buffers(split.plan.problem, operands, main), operands)
    results = _run(plan.backward, split.plan.problem, buffers)
    dbias = None
    if operands.bias is not None:
        lengths, tile = _lengths(plan.problem), BIAS_GRADIENT_TILES[main.key.arch]
        dbias = bias_buffer.gradient(operands.bias, results["dbias"], lengths, tile)
    return Gradients(results["dq"], split.join(results["dk"]), split.join(results["dv"]), dbias)


def _lengths(problem: Problem) -> tuple[int, int]:
    return problem.query_length, problem.key_length
