"""Softmax attention in numpy: the float64 oracle, and the ordinary computation it is judged by.

    s = cap(scale q k^T) + bias,  lse = log sum exp s,  p = exp(s - lse),  o = p v
    dv = p^T do,  ds = p (do v^T - rowsum(do o) + dlse),  dbias = ds
    dx = cap' ds,  dq = scale dx k,  dk = scale dx^T q
    s' = cap' scale (q' k^T + q k'^T),  w = p s',  lse' = rowsum(w),  o' = p v' + w v - lse' o
    p' = w - p lse',  dv' = p'^T do,  ds' = p' (do v^T - delta) + p (do v'^T - rowsum(do o'))
    dx' = cap' ds' + cap'' ds,  dq' = scale (dx' k + dx k'),  dk' = scale (dx'^T q + dx^T q')

with delta = rowsum(do o) - dlse, tangents q', k', v' of the operands where there are any, and
cap(x) = c tanh(x / c) of a soft cap c, cap'' that of its slope; a sink is one more score of each
row, its value is 0.

Both run this text. The oracle keeps float64 throughout; the ordinary computation works in float32
and rounds to the storage type what a fused kernel does: the operands of products, and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from fa4_jax.conformance import biases
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.row_masks import KINDS, Arrays

STORAGE = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "f32": np.float32}


TANGENTS = ("output_tangent", "lse_tangent")
HESSIAN_PRODUCTS = ("dq_tangent", "dk_tangent", "dv_tangent")
"""What is computed of inputs that have tangents, besides."""


def names(case: Case) -> tuple[str, ...]:
    """What is computed: results of the forward, then gradients."""
    return (
        *("output", "lse"),
        *(("max_logit",) if case.max_logit else ()),
        *("dq", "dk", "dv"),
        *(("dbias",) if case.bias is not None else ()),
        *(("dsinks",) if case.sinks else ()),
    )


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a case, in storage types, with the cotangents of both results.

    query, output_bar [B, T, N, H]; key, value [B, S, K, H]; lse_bar [B, N, T] f32. Of value and
    output_bar H is the case's value_dim. masks: arrays by the name of their kind; sinks [N];
    tangents: of query, key and value, or none; bias: dense, in the storage type, or the array of
    its kind (`biases`).
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    output_bar: np.ndarray
    lse_bar: np.ndarray
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    masks: dict[str, Arrays] = dataclasses.field(default_factory=dict[str, Arrays])
    sinks: np.ndarray | None = None
    tangents: tuple[np.ndarray, ...] = ()


def make_inputs(case: Case, seed: int) -> Inputs:
    """Random inputs of a case."""
    rng = np.random.default_rng([seed, *case.id.encode()])
    storage = STORAGE[case.dtype]
    (n, k), h = case.heads, case.head_dim
    rows, keys = (case.batch, case.query_length, n, h), (case.batch, case.key_length, k, h)
    query, key = rng.normal(size=rows) * case.magnitude, rng.normal(size=keys) * case.magnitude
    if case.growing:
        key += query.mean() + np.linspace(0, 4, case.key_length)[None, :, None, None]
        query = np.abs(query)
    if case.opposed:
        query, key = np.abs(query) + 4, -np.abs(key) - 4
    width = case.value_dim or h
    value, output_bar = rng.normal(size=(*keys[:3], width)), rng.normal(size=(*rows[:3], width))
    mask = None if case.mask is None else rng.random(case.mask) < 0.7
    masks = {name: KINDS[name].draw(case, rng) for name in case.masks}
    if case.poison:
        seen = None if mask is None and not masks else visible(case, mask, masks)
        _poison(case, [query, output_bar], [key, value], seen)
    bias = _drawn_bias(case, rng)
    return Inputs(
        *(x.astype(storage) for x in (query, key, value, output_bar)),
        lse_bar=rng.normal(size=(case.batch, n, case.query_length)).astype(np.float32),
        bias=bias,
        mask=mask,
        masks=masks,
        sinks=rng.normal(size=n).astype(storage) * 2 if case.sinks else None,
    )


def _drawn_bias(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    if isinstance(case.bias, str):
        return biases.KINDS[case.bias].draw(case, rng)
    if case.bias is None:
        return None
    bias = rng.normal(size=case.bias)
    if case.poison:
        for axis, lengths in ((2, case.query_lengths), (3, case.key_lengths)):
            for b, length in enumerate(lengths or ()):
                if bias.shape[0] > 1 and bias.shape[axis] > 1:
                    np.moveaxis(bias, axis, 1)[b, length:] = np.nan
    return bias.astype(STORAGE[case.dtype])


def with_tangents(case: Case, inputs: Inputs, seed: int) -> Inputs:
    """The inputs with random tangents of query, key and value.

    Where these hold Inf or NaN, because nobody may look there, their tangents do.
    """
    rng = np.random.default_rng([seed, 1, *case.id.encode()])
    operands = inputs.query, inputs.key, inputs.value
    drawn = (rng.normal(size=x.shape).astype(x.dtype) for x in operands)
    query, *keys = (np.where(np.isfinite(x), t, x) for x, t in zip(operands, drawn, strict=True))
    return dataclasses.replace(inputs, tangents=(query, *keys))


def _poison(case: Case, rows: list[Any], keys: list[Any], seen: np.ndarray | None) -> None:
    """Writes NaN and Inf wherever nothing may look: padding, and keys that a mask hides."""
    padding = ((rows, case.query_lengths), (keys, case.key_lengths))
    for arrays, lengths in padding:
        for b, length in enumerate(lengths or ()):
            for x in arrays:
                x[b, length:] = np.nan
                x[b, length::2] = np.inf
    if seen is not None:
        for x in keys:
            x[~seen.any(axis=(1, 2))] = np.nan


def visible(
    case: Case, mask: np.ndarray | None, masks: Mapping[str, Arrays] | None = None
) -> np.ndarray:
    """Which row sees which key, bool [B, N, T, S]."""
    i = np.arange(case.query_length)[None, :, None]
    j = np.arange(case.key_length)[None, None, :]
    offset = np.broadcast_to(np.asarray(case.query_offset), (case.batch,))[:, None, None]
    left, right = case.window if isinstance(case.window, tuple) else (case.window, case.window)
    seen = np.ones((case.batch, case.query_length, case.key_length), bool)
    by_head = np.ones((1, 1, 1, 1), bool)
    if case.is_causal:
        seen &= j <= i + offset
    if left is not None:
        seen &= j >= i + offset - left
    if right is not None:
        seen &= j <= i + offset + right
    for name, arrays in (masks or {}).items():
        found = KINDS[name].seen(case, arrays)
        by_head = by_head & (found if found.ndim == 4 else found[..., None, :, :])
    if case.query_lengths is not None:
        seen &= i < np.asarray(case.query_lengths)[:, None, None]
    if case.key_lengths is not None:
        seen &= j < np.asarray(case.key_lengths)[:, None, None]
    shape = (case.batch, case.heads[0], case.query_length, case.key_length)
    seen = seen[:, None] & by_head
    return np.broadcast_to(seen if mask is None else seen & mask, shape)


@dataclasses.dataclass(frozen=True)
class _Precision:
    """Working type, and the storage type to which products' operands and results are rounded."""

    work: Any
    storage: Any | None  # None: no rounding
    reference_shift: float = 0.0  # by how much the softmax's reference lies below the row maximum

    def rounded(self, x: np.ndarray) -> np.ndarray:
        return x if self.storage is None else x.astype(self.storage).astype(self.work)

    def rounded_score(self, x: np.ndarray) -> np.ndarray:
        """Rounds while another constant factor, as the softmax scale may be, is folded in."""
        factor = self.work(2.0**-self.reference_shift)
        return self.rounded(x * factor) / factor


def _heads_first(x: np.ndarray, used: Any, work: Any) -> np.ndarray:
    """[B, L, heads, H] -> [B, N, L, H] in the working type, rows that nobody uses zeroed.

    used: bool [B, N, L].
    """
    x = np.repeat(x.astype(work).transpose(0, 2, 1, 3), used.shape[1] // x.shape[2], axis=1)
    return np.where(used[..., None], x, 0)


def _by_key_head(x: np.ndarray, group: int) -> np.ndarray:
    """[B, N, S, H] -> [B, S, K, H], groups summed."""
    b, n, length, h = x.shape
    return x.reshape(b, n // group, group, length, h).sum(2).transpose(0, 2, 1, 3)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Operands [B, N, T or S, H], who sees whom [B, N, T, S], and what makes scores of products.

    slope, bend: of the soft cap, and its slope's own derivative over the slope; 1 and 0 without.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    seen: np.ndarray
    scale: Any
    slope: Any
    bend: Any


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Unnormalised weights e and their sums, P, dP - delta and dS, [B, N, T, S]; the output."""

    e: np.ndarray
    total: np.ndarray
    p: np.ndarray
    dp: np.ndarray
    ds: np.ndarray
    o: np.ndarray


def _moved(
    inputs: Inputs, precision: _Precision, of: _Scores, weights: _Weights, group: int
) -> dict[str, np.ndarray]:
    """TANGENTS and HESSIAN_PRODUCTS where query, key and value move."""
    work, rounded, rounded_score = precision.work, precision.rounded, precision.rounded_score
    q, k, v, do, p, ds, o = of.q, of.k, of.v, of.do, weights.p, weights.ds, weights.o
    q_dot = _heads_first(inputs.tangents[0], of.seen.any(3), work)
    k_dot, v_dot = (_heads_first(x, of.seen.any(2), work) for x in inputs.tangents[1:])
    x_dot = np.where(of.seen, q_dot @ k.swapaxes(2, 3) + q @ k_dot.swapaxes(2, 3), 0)
    s_dot = x_dot * of.scale * of.slope
    w = p * s_dot
    # As fused kernels do: normalised last.
    lse_dot = (weights.e * s_dot).sum(-1, keepdims=True) / weights.total
    o_dot = rounded(rounded_score(p) @ v_dot + rounded_score(w) @ v - lse_dot * o)
    # A kernel subtracts from the unrounded product (FMA).
    exact = x_dot.astype(np.float64) * (of.scale * of.slope) - lse_dot
    p_dot = p * exact.astype(work)
    dp_dot = do @ v_dot.swapaxes(2, 3) - (do * o_dot).sum(-1, keepdims=True)
    ds_dot = p_dot * weights.dp + p * dp_dot
    dx = rounded_score(ds * of.slope)
    dx_dot = rounded_score(ds_dot * of.slope + ds * of.bend * s_dot)
    dk_dot = dx_dot.swapaxes(2, 3) @ q + dx.swapaxes(2, 3) @ q_dot
    return {
        "output_tangent": o_dot.transpose(0, 2, 1, 3),
        "lse_tangent": lse_dot[..., 0],
        "dq_tangent": rounded((dx_dot @ k + dx @ k_dot) * of.scale).transpose(0, 2, 1, 3),
        "dk_tangent": rounded(_by_key_head(dk_dot, group) * of.scale),
        "dv_tangent": rounded(_by_key_head(rounded_score(p_dot).swapaxes(2, 3) @ do, group)),
    }


def _attention(case: Case, inputs: Inputs, precision: _Precision) -> dict[str, np.ndarray]:
    work, rounded, rounded_score = precision.work, precision.rounded, precision.rounded_score
    group = case.heads[0] // case.heads[1]
    seen = visible(case, inputs.mask, inputs.masks)
    scale = work(case.head_dim**-0.5 if case.scale is None else case.scale)

    q, do = (_heads_first(x, seen.any(3), work) for x in (inputs.query, inputs.output_bar))
    k, v = (_heads_first(x, seen.any(2), work) for x in (inputs.key, inputs.value))
    s = q @ k.swapaxes(2, 3) * scale
    slope, bend = work(1), work(0)
    if case.soft_cap is not None:
        tanh = np.tanh(s / work(case.soft_cap))
        s, slope = work(case.soft_cap) * tanh, 1 - tanh * tanh
        bend = -2 * tanh / work(case.soft_cap)
    if inputs.bias is not None:
        s = s + _spread(case, inputs.bias.astype(work))
    s = np.where(seen, s, -np.inf)
    max_logit = s.max((2, 3))
    sink = _sinks(case, inputs, work)  # [B, N, T, 1]
    top = np.maximum(s.max(-1, keepdims=True), sink)
    top = top - work(precision.reference_shift)
    safe_top = np.where(np.isneginf(top), 0, top)
    e = np.exp(s - safe_top)
    total = e.sum(-1, keepdims=True) + np.exp(sink - safe_top)
    empty = total == 0
    safe = np.where(empty, 1, total)
    lse = np.where(empty, -np.inf, top + np.log(safe))  # [B, N, T, 1]
    o = rounded(rounded(e) @ v / safe)
    p = np.exp(s - np.where(empty, 0, lse))
    delta = (do * o).sum(-1, keepdims=True) - inputs.lse_bar.astype(work)[..., None]
    dp = do @ v.swapaxes(2, 3) - delta
    ds = p * dp
    dx = ds * slope

    results = {
        "output": o.transpose(0, 2, 1, 3),
        "lse": lse[..., 0],
        "dq": rounded(rounded_score(dx) @ k * scale).transpose(0, 2, 1, 3),
        "dk": rounded(_by_key_head(rounded_score(dx).swapaxes(2, 3) @ q, group) * scale),
        "dv": rounded(_by_key_head(rounded_score(p).swapaxes(2, 3) @ do, group)),
    }
    if inputs.tangents:
        weights = _Weights(e, safe, p, dp, ds, o)
        scores = _Scores(q, k, v, do, seen, scale, slope, bend)
        results |= _moved(inputs, precision, scores, weights, group)
    if case.max_logit:
        results["max_logit"] = max_logit
    rows: dict[str, np.ndarray] = {}  # [B, T, *result]: what each row adds.
    if inputs.sinks is not None:
        share = np.exp(sink - np.where(empty, 0, lse))
        rows["dsinks"] = -(share * delta)[..., 0].swapaxes(1, 2)
        results["dsinks"] = rounded(rows["dsinks"].sum((0, 1)))
    if isinstance(case.bias, str):
        assert inputs.bias is not None
        kind, distance = biases.KINDS[case.bias], biases.distances(case)
        results["dbias"], of_rows = kind.gradient(ds, distance, inputs.bias.shape)
        if of_rows is not None:
            rows["dbias"] = of_rows
    elif inputs.bias is not None:
        summed = tuple(i for i, size in enumerate(inputs.bias.shape) if size == 1)
        results["dbias"] = rounded(ds.sum(summed, keepdims=True))
    of_tangents = (*TANGENTS, *HESSIAN_PRODUCTS) if inputs.tangents else ()
    found = {name: results[name] for name in (*names(case), *of_tangents)}
    return found | {f"{name}_rows": terms for name, terms in rows.items()}


def _spread(case: Case, bias: np.ndarray) -> np.ndarray:
    """What is added to the scores, broadcasting to [B, N, T, S]."""
    if isinstance(case.bias, str):
        return biases.KINDS[case.bias].spread(bias, biases.distances(case))
    return bias


def _sinks(case: Case, inputs: Inputs, work: Any) -> np.ndarray:
    """The score of each row's sink, [B, N, T, 1]; -inf past the query length and without sinks."""
    shape = case.batch, case.heads[0], case.query_length
    if inputs.sinks is None:
        return np.full((*shape, 1), -np.inf, work)
    lengths = case.query_lengths or (case.query_length,) * case.batch
    below = np.arange(case.query_length) < np.asarray(lengths)[:, None, None]
    return np.where(below, inputs.sinks.astype(work)[:, None], -np.inf)[..., None].astype(work)


def oracle(case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """output [B, T, N, H], lse [B, N, T] and the gradients, in float64.

    Gradients that are sums over all rows, of sinks and of biases by positions, have their terms,
    [B, T, *gradient], beside them (`dsinks_rows`).
    """
    return _attention(case, inputs, _Precision(np.float64, None))


REFERENCE_SHIFTS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75)
"""Softmax references below the row maximum, and log2 of factors folded into scores and their
gradients, that an ordinary kernel may as well choose."""


def judges(
    name: str, expected: dict[str, np.ndarray], usual: Sequence[dict[str, np.ndarray]]
) -> list[np.ndarray]:
    """One quantity of several ordinary computations, by which a result is judged.

    Of a sum over all rows there may be two values, say, and in all ordinary computations the rows'
    errors may happen to cancel. So each of them counts once more, as if its rows' errors, added
    with random signs, came to their root mean square.
    """
    found = [computed[name] for computed in usual]
    rows = f"{name}_rows"
    if rows in expected:
        errors = (np.square(computed[rows] - expected[rows]).sum((0, 1)) for computed in usual)
        found += [expected[name] + np.sqrt(squares) for squares in errors]
    return found


def ordinary(
    case: Case, inputs: Inputs, reference_shift: float = 0.0, copies: int = 1
) -> dict[str, np.ndarray]:
    """The same as an ordinary fused kernel computes it: float32, products' operands rounded.

    Where a KV head counts as several `copies`, each with a part of its group of query heads, the
    copies' gradients are rounded before they are summed.

    The reference that is subtracted before the exponential, and a factor folded into dS before it
    is rounded, change nothing in exact arithmetic, but they decide how each element is rounded:
    every shift is another draw of rounding errors of the same size, and the largest of several is
    a steadier measure than the largest of one.
    """
    storage = None if case.dtype == "f32" else STORAGE[case.dtype]
    precision = _Precision(np.float32, storage, reference_shift)
    n, k = case.heads
    key, value = (np.repeat(x, copies, axis=2) for x in (inputs.key, inputs.value))
    parts = dataclasses.replace(inputs, key=key, value=value)
    found = _attention(dataclasses.replace(case, heads=(n, k * copies)), parts, precision)
    if copies > 1:
        for name in ("dk", "dv"):
            b, s, _, h = found[name].shape
            found[name] = precision.rounded(found[name].reshape(b, s, k, copies, h).sum(3))
    return found
