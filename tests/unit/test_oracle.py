"""Compares the numpy oracle with JAX's autodiff of the definition, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import (
    REFERENCE_SHIFTS,
    judges,
    make_inputs,
    names,
    oracle,
    ordinary,
    visible,
)

CASES = (
    Case(dtype="f32", heads=(4, 2), query_length=9, key_length=13),
    Case(dtype="f32", query_length=9, key_length=13, is_causal=True, query_offset=-4),
    Case(dtype="bf16", query_length=7, key_length=5, window=(2, 1), scale=0.3),
    Case(dtype="f32", query_length=7, key_length=5, key_lengths=(0, 3), query_lengths=(7, 4)),
    Case(dtype="f32", heads=(2, 1), query_length=6, key_length=8, bias=(1, 2, 1, 8)),
    Case(dtype="f32", query_length=6, key_length=8, bias=(2, 1, 6, 8), mask=(1, 2, 6, 8)),
    Case(dtype="f32", query_length=6, key_length=8, soft_cap=0.7, bias=(1, 2, 6, 1)),
    Case(dtype="f32", query_length=6, key_length=8, sinks=True, query_lengths=(6, 3)),
    Case(dtype="f32", query_length=90, key_length=90, masks=("scattered",), max_logit=True),
    Case(dtype="f32", query_length=90, key_length=97, masks=("ranges",), sinks=True, soft_cap=3.0),
)


def definition(case: Case, seen: np.ndarray, operands: dict[str, Any]) -> Any:
    """Returns the forward's results by the textbook; rows without keys are 0 and -inf."""
    group = case.heads[0] // case.heads[1]
    k, v = (jnp.repeat(operands[name], group, axis=2) for name in ("key", "value"))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    scores = jnp.einsum("btnh,bsnh->bnts", operands["query"], k) * scale
    if case.soft_cap is not None:
        scores = case.soft_cap * jnp.tanh(scores / case.soft_cap)
    scores = scores + operands.get("bias", 0)
    top = jnp.where(seen, scores, -jnp.inf).max((2, 3))
    empty = jnp.asarray(~seen.any(-1))
    if case.sinks:
        # One more key, with a value of 0, that all rows below the query length see.
        b, n, t, _ = seen.shape
        lengths = case.query_lengths or (t,) * b
        empty = np.broadcast_to(np.arange(t) >= np.array(lengths)[:, None, None], (b, n, t))
        sink = jnp.broadcast_to(operands["sinks"][None, :, None, None], (b, n, t, 1))
        scores = jnp.concatenate([scores, sink], -1)
        seen = np.concatenate([seen, np.ones((b, n, t, 1), bool)], -1)
        v = jnp.concatenate([v, jnp.zeros_like(v[:, :1])], 1)
    scores = jnp.where(seen | empty[..., None], scores, -jnp.inf)
    output = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    lse = jax.nn.logsumexp(scores, axis=-1)
    output = jnp.where(empty.transpose(0, 2, 1)[..., None], 0, output)
    return (output, jnp.where(empty, -jnp.inf, lse)), top


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_autodiff_of_the_definition(case: Case, seed: int):
    inputs = make_inputs(case, seed)
    results = oracle(case, inputs)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        given = {x: getattr(inputs, x) for x in ("query", "key", "value", "bias", "sinks")}
        primals = {
            name: jnp.asarray(x.astype(np.float64)) for name, x in given.items() if x is not None
        }
        seen = visible(case, inputs.mask, inputs.masks)
        values, pull_back, top = jax.vjp(
            lambda primals: definition(case, seen, primals), primals, has_aux=True
        )
        bars = [jnp.asarray(x.astype(np.float64)) for x in (inputs.output_bar, inputs.lse_bar)]
        (found,) = pull_back(tuple(bars))
        tops = (top,) if case.max_logit else ()
        expected = (*values, *tops, *(found[name] for name in primals))
    assert tuple(name for name in results if not name.endswith("_rows")) == names(case)
    for name, value in zip(names(case), expected, strict=True):
        np.testing.assert_allclose(results[name], value, rtol=1e-11, atol=1e-12, err_msg=name)


def test_gradients_of_copies_are_rounded_before_they_are_summed(seed: int):
    case = Case(heads=(4, 1), query_length=40, key_length=50, is_causal=True)
    inputs = make_inputs(case, seed)
    exact, whole, apart = oracle(case, inputs), ordinary(case, inputs), ordinary(case, inputs, 0, 4)
    for name in ("output", "lse", "dq"):
        np.testing.assert_allclose(apart[name], whole[name], rtol=1e-5, atol=1e-6)
    for name in ("dk", "dv"):
        assert (
            np.square(apart[name] - exact[name]).sum() > np.square(whole[name] - exact[name]).sum()
        )


def test_the_ordinary_computation_rounds_to_the_storage_type(seed: int):
    case = Case(dtype="bf16", query_length=40, key_length=50)
    inputs = make_inputs(case, seed)
    exact, usual = oracle(case, inputs), ordinary(case, inputs)
    for name in ("output", "dq", "dk", "dv"):
        error = np.abs(usual[name] - exact[name]).max() / np.abs(exact[name]).max()
        assert 2e-4 < error < 2e-2, name


def test_rows_whose_errors_cancel_still_allow_the_error_of_their_sum():
    """Gradients of two sinks that a good kernel gave, where all ordinary ones were lucky."""
    case = Case(
        batch=2,
        heads=(2, 1),
        query_length=130,
        key_length=200,
        window=(60, 0),
        query_offset=60,
        query_lengths=(130, 77),
        sinks=True,
        max_logit=True,
    )
    inputs = make_inputs(case, 1894445200)
    expected = oracle(case, inputs)
    usual = [ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS]
    given = expected["dsinks"] + np.array([0.00207, 0.0])
    alone = [computed["dsinks"] for computed in usual]
    assert compare("dsinks", "bf16", given, expected["dsinks"], alone).failure
    found = judges("dsinks", expected, usual)
    assert compare("dsinks", "bf16", given, expected["dsinks"], found).failure is None
    wrong = expected["dsinks"] + np.array([0.004, 0.0])
    assert compare("dsinks", "bf16", wrong, expected["dsinks"], found).failure
