"""The public call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fa4_jax import autodiff, bands, catalogue, designs, extents, mesh_types, score, validate, xla
from fa4_jax.bias import AtDistances, Bias, first_distance, form
from fa4_jax.extents import Extents
from fa4_jax.masks import Mask, bits, in_bias, of_pairs, resolve, values
from fa4_jax.masks.pairs import Pairs
from fa4_jax.masks.values import Ids
from fa4_jax.operands import MaskBits, Operands, Results, RowRanges
from fa4_jax.plan import Plan, Target, make_plan
from fa4_jax.problem import Problem
from fa4_jax.sharding import explicit
from fa4_jax.target import current_target, named_target

Implementation = Literal["kernel", "xla"] | None
Numerics = Literal["fast", "exact"]
ScoreFn = Callable[..., Any] | None
Window = int | tuple[int | None, int | None] | None


class Options(TypedDict, total=False):
    """Keyword arguments of `attention` that do not decide what it returns."""

    scale: float | jax.Array | None
    is_causal: bool
    query_offset: int | ArrayLike
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: Window
    segment_ids: Ids
    logits_soft_cap: float | jax.Array | None
    sinks: ArrayLike | None
    score_fn: ScoreFn
    deterministic: bool
    numerics: Numerics
    implementation: Implementation
    arch: str | None


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | Bias | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | Bias | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | Bias | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: Literal[False] = False,
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | Bias | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | Bias | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: bool = False,
    return_max_logit: bool = False,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, ...]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | Bias | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_offset: int | ArrayLike = 0,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    segment_ids: Ids = None,
    logits_soft_cap: float | jax.Array | None = None,
    sinks: ArrayLike | None = None,
    score_fn: ScoreFn = None,
    deterministic: bool = False,
    numerics: Numerics = "fast",
    return_residual: bool = False,
    return_max_logit: bool = False,
    implementation: Implementation = None,
    arch: str | None = None,
) -> Any:
    """softmax(cap(scale query key^T) + bias) value, by heads, without holding the [T, S] scores.

    Names, layout and causal alignment are those of `jax.nn.dot_product_attention`.

    Args:
      query: [B, T, N, H] or [T, N, H]; bfloat16, float16, float32 or float64 (the latter two on
        the default path).
      key, value: [B, S, K, H] or [S, K, H], of query's dtype. N is a multiple of K; query head n
        uses key head n // (N // K). Value may have another head dim.
      bias: added to the scaled scores: of `fa4_jax.bias`; or floating, broadcasts to [B, N, T, S]
        (leading axes may be missing). Differentiable. Kernels read an element for every key, and
        beside a mask one for each pair that it tells apart; others run on the default path.
      mask: of `fa4_jax.masks`; or boolean, True where a query may see a key, broadcast like bias.
        The kernels hold bits of what is a boolean array, a function, a union or a complement.
      scale: positive; 1 / sqrt(H) by default. Unlike `jax.nn`'s it must be static for the kernels;
        a traced one runs on the default path, and has a gradient.
      is_causal: row i sees the keys j <= i + query_offset.
      query_offset: position of row 0 among the keys, within +-2^29; an integer, or integers [B],
        traced or not. S - T aligns the last row with the last key (FlashAttention's convention).
      query_seq_lengths, key_value_seq_lengths: integers [B]; what lies beyond is padding and may
        hold anything, Inf and NaN included. Integers are of any type, with values that fit int32.
      local_window_size: (left, right): row i sees the keys from i + query_offset - left to
        i + query_offset + right; None is open; an int is both.
      segment_ids: int32 [B, T] where T == S, or a pair (query [B, T], key [B, S]); the axis B may
        be 1, and 3-D calls drop it. Row and key meet if their ids are equal and not negative, in
        any order: a negative id is padding. Positions go on from segment to segment.
      logits_soft_cap: positive; scores become cap * tanh(score / cap) after the scale, before bias
        and masks. A traced one has a gradient.
      sinks: [N], floating: a score of each head with a value of 0, which takes part in the softmax
        as one more key that every row sees. Differentiable.
      score_fn: fn(score, b, h, q, k), elementwise in jax.numpy, of scores after scale, soft cap and
        bias and before masks, a part [B, N, rows, keys] at a time, in float32 (float64): it gets
        int32 indices of batch entries and query heads, the rows' positions i + query_offset and
        the keys' j, which broadcast to that, and returns scores. Differentiated; it must not close
        over traced arrays (those are for `bias`). Programs are traced again for another function,
        so define it once. Runs on the default path.
      deterministic: gradients are bitwise the same in every run.
      numerics: "fast" lets the kernels use a polynomial for part of the exponentials and rescale
        lazily (FlashAttention-4); "exact" does neither.
      return_residual: also return the log-sum-exp of each row.
      return_max_logit: also return the largest score of each head that a row sees, with scale, soft
        cap, bias and score_fn, without the sink; not differentiated.
      implementation: "kernel" insists on the GPU kernels, "xla" on pure JAX; None takes the kernels
        where there are any for this call, and logs once why a program for NVIDIA GPUs has none.
      arch: "sm_90a" or "sm_100f": architecture of the GPU that the program is lowered for, where
        it is not this machine's (`jax.export`); None takes the GPU that JAX sees.

    Returns:
      The output, like query (with value's head dim); a row that sees no key, or lies past its
      query length, is 0.
      With return_residual, (output, lse): lse is float32 (float64 for float64) [B, N, T] ([N, T];
      `jax.nn` has [B, T, N]), natural logarithm, -inf for such rows, and differentiable. With sinks
      it includes them: a row that sees no key has its sink, one past its query length -inf.
      With return_max_logit float32 [B, N] ([N]) follows, -inf if no row sees a key.

    Raises:
      ValueError: an argument is wrong; its name and value are in the message.
      NotImplementedError: no implementation takes this call; the message says why.
    """
    call = Call(
        *(query, key, value, bias, mask),
        scale=scale,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        score_fn=score_fn,
        return_max_logit=return_max_logit,
        deterministic=deterministic,
        numerics=numerics,
    )
    validate.flag("return_residual", return_residual)
    validate.choice("implementation", implementation, validate.IMPLEMENTATIONS)
    operands, plan = planned(call, find_target(arch), implementation)
    operands = for_kernels(plan, operands)
    results = explicit.attend_on_mesh(_attend, plan, operands)
    return returned(results, jnp.ndim(query), return_residual)


def planned(call: Call, target: Target, implementation: Implementation) -> tuple[Operands, Plan]:
    """Operands and launches of a call. Where kernels may take it, a dense bias holds its masks.

    Raises:
      ValueError, NotImplementedError: as `attention`.
    """
    operands, problem = canonicalise(call)
    if target.arch is not None and implementation != "xla":
        operands, problem = in_bias.moved(operands, problem)
    return operands, make_plan(problem, target, implementation)


def for_kernels(plan: Plan, operands: Operands) -> Operands:
    """The operands of kernels, which read a mask of pairs as bits, a bias by distance as numbers.

    Raises:
      NotImplementedError: these bits would be too many.
    """
    problem = plan.problem
    if not plan.forward or validate.is_empty(problem):
        return operands
    added = operands.bias
    if problem.bias == "distance":
        offset = operands.extents[:, 2] if operands.offset is None else operands.offset[None]
        added = AtDistances.of(added, (problem.query_length, problem.key_length), offset)
    packed = bits.of_operands(operands)
    return operands._replace(mask=None, pairs=None, bits=packed, bias=added)


def returned(results: Results, rank: int, return_residual: bool) -> Any:
    """What a call returns: output, or a tuple that the log-sum-exp and the largest scores follow.

    Args:
      rank: of query, as the caller gave it.
    """
    if rank == 3:
        results = jax.tree.map(lambda x: x[0], results)
    output, lse, max_logit = results
    found = (output, lse) if return_residual else (output,)
    if max_logit is not None:
        found = (*found, jax.lax.stop_gradient(max_logit))
    return found if len(found) > 1 else output


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of `attention` that describe what is computed, as the caller gave them."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    _: dataclasses.KW_ONLY
    scale: Any = None
    is_causal: Any = False
    query_offset: Any = 0
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    local_window_size: Any = None
    segment_ids: Any = None
    logits_soft_cap: Any = None
    sinks: Any = None
    score_fn: Any = None
    return_max_logit: Any = False
    deterministic: Any = False
    numerics: Any = "fast"


def canonicalise(call: Call) -> tuple[Operands, Problem]:
    """Checked operands of rank 4, and the static facts about them.

    Raises:
      ValueError, NotImplementedError: as `attention`.
    """
    q, k, v = (jnp.asarray(x) for x in (call.query, call.key, call.value))
    validate.arrays(q, k, v)
    scale, traced = validate.scale(call.scale, q.shape[-1])
    q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
    (b, t, n, h), (_, s, kv_heads, value_dim) = q.shape, v.shape
    numbers = extents.checked(
        call.query_seq_lengths, call.key_value_seq_lengths, call.query_offset, b
    )
    bias = _bias(call.bias, (b, n, t, s), jnp.ndim(call.query))
    mask = None if isinstance(call.mask, Mask) else _rank_4(call.mask)
    validate.dense("mask", mask, (b, n, t, s))
    cap, traced_cap = validate.soft_cap(call.logits_soft_cap)
    sinks = validate.sinks(call.sinks, n)
    rows, window = resolved_rows(call, numbers, (b, t, s))
    pairs, packed = resolved_pairs(call, numbers, (b, t, s, n))
    problem = Problem(
        batch=b,
        query_length=t,
        key_length=s,
        query_heads=n,
        kv_heads=kv_heads,
        head_dim=h,
        dtype=validate.DTYPES[q.dtype.name],
        scale=scale,
        window=window,
        has_lengths=numbers.has_lengths,
        bias=form(bias, s),
        bias_first=first_distance(bias, s),
        has_score_fn=call.score_fn is not None,
        has_mask=not (mask is None and pairs is None and packed is None),
        soft_cap=cap,
        has_soft_cap=call.logits_soft_cap is not None,
        has_sinks=sinks is not None,
        returns_max_logit=validate.flag("return_max_logit", call.return_max_logit),
        has_ranges=rows is not None,
        has_tags=rows is not None and rows.tags is not None,
        deterministic=validate.flag("deterministic", call.deterministic),
        numerics=validate.choice("numerics", call.numerics, validate.NUMERICS),
        value_dim=None if value_dim == h else value_dim,
    )
    reads_offset = problem.band or problem.bias == "distance"
    offset = numbers.common_offset() if reads_offset else None
    offsets = extents.offset_array(numbers.query_offset)
    traced, traced_cap, sinks = (
        None if x is None else x.astype(problem.accumulator) for x in (traced, traced_cap, sinks)
    )
    operands = Operands(
        *(q, k, v, numbers.array(b, t, s), bias, mask, offset),
        scale=traced,
        rows=rows,
        soft_cap=traced_cap,
        sinks=sinks,
        pairs=pairs,
        bits=packed,
        score=score.checked(call.score_fn, (b, n, t, s), offsets, problem.accumulator),
    )
    axes = mesh_types.union_varying(operands)
    return jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), operands), problem


def resolved_rows(
    call: Call,
    numbers: Extents,
    sizes: tuple[int, int, int],
    tokens: resolve.Tokens = resolve.Tokens(),  # noqa: B008 (frozen)
) -> tuple[RowRanges | None, bands.Window]:
    """What a row sees by masks and segments; and the window of numbers.

    Args:
      numbers: lengths and offset of the call.
      sizes: batch, query length and key length.
      tokens: how arrays of tokens are given.

    Raises:
      ValueError, NotImplementedError: as `attention`.
    """
    window = validate.window(call.local_window_size, call.is_causal)
    mask = call.mask if isinstance(call.mask, Mask) else None
    parts = values.parts(mask, call.segment_ids)
    if call.is_causal and any(isinstance(part, values.Prefix) for part in parts):
        raise ValueError("is_causal=True beside masks.prefix, which contains causality: drop it")
    (left, right), parts = resolve.static_window(parts)
    offset = extents.offset_array(numbers.query_offset)
    parts, _ = of_pairs.divided(parts)
    rows = resolve.rows(parts, resolve.Call(*sizes, jnp.ndim(call.query), offset, tokens))
    return rows, (min(window[0], left), min(window[1], right))


def resolved_pairs(
    call: Call,
    numbers: Extents,
    sizes: tuple[int, int, int, int],
    tokens: resolve.Tokens = resolve.Tokens(),  # noqa: B008 (frozen)
) -> tuple[Pairs | None, MaskBits | None]:
    """The mask of pairs of a mask value, or its bits if they have been made.

    Args:
      numbers, sizes, tokens: as of `resolved_rows`; the number of query heads is the last size.

    Raises:
      ValueError, NotImplementedError: as `attention`.
    """
    if not isinstance(call.mask, Mask):
        return None, None
    if isinstance(call.mask, values.Prepared):
        made = call.mask
        if (heads := bits.heads_of(made.pairs, made.bits)) not in (1, sizes[3]):
            raise ValueError(
                f"mask: its tile table was made for {heads} heads, but query has {sizes[3]}"
            )
        return made.pairs, made.bits
    batch, t, s, heads = sizes
    _, parts = of_pairs.divided(values.parts(call.mask))
    offset = extents.offset_array(numbers.query_offset)
    known = resolve.Call(batch, t, s, jnp.ndim(call.query), offset, tokens)
    return of_pairs.found(parts, known, heads), None


def _bias(x: Any, sizes: tuple[int, int, int, int], rank: int) -> Any:
    """A dense bias of rank 4, or a checked value of positions.

    Args:
      sizes: batch, query heads, query and key length.
      rank: of query, as the caller gave it.
    """
    if isinstance(x, Bias):
        return x.checked(sizes[:3], rank)
    x = _rank_4(x)
    validate.dense("bias", x, sizes)
    return x


def _rank_4(x: Any) -> jax.Array | None:
    """A dense operand with the leading axes that it lacks."""
    if x is None:
        return None
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def find_target(arch: str | None) -> Target:
    """The kernels for this machine's GPU, or for the architecture that is named.

    Raises:
      ValueError: there is no such architecture, or no such design as the environment names.
    """
    validate.choice("arch", arch, (None, *catalogue.ARCHITECTURES))
    target = current_target() if arch is None else named_target(arch)
    design = designs.asked()
    return target if design is None else dataclasses.replace(target, design=design)


def _attend(plan: Plan, operands: Operands) -> Results:
    """Output [B, T, N, H], log-sum-exp [B, N, T] f32 and largest scores."""
    if validate.is_empty(plan.problem):
        return xla.nothing(plan.problem, operands)
    return autodiff.attend(plan, operands)
