"""Compares the numpy oracle with JAX's autodiff of the definition, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import NAMES, make_inputs, oracle, ordinary, visible

CASES = (
    Case(dtype="f32", heads=(4, 2), query_length=9, key_length=13),
    Case(dtype="f32", query_length=9, key_length=13, is_causal=True, query_offset=-4),
    Case(dtype="bf16", query_length=7, key_length=5, window=(2, 1), scale=0.3),
    Case(dtype="f32", query_length=7, key_length=5, key_lengths=(0, 3), query_lengths=(7, 4)),
    Case(dtype="f32", heads=(2, 1), query_length=6, key_length=8, bias=(1, 2, 1, 8)),
    Case(dtype="f32", query_length=6, key_length=8, bias=(2, 1, 6, 8), mask=(1, 2, 6, 8)),
)


def definition(case: Case, seen: np.ndarray, q: Any, k: Any, v: Any, bias: Any = None):
    """Returns output and log-sum-exp by the textbook; rows without keys are 0 and -inf."""
    group = case.heads[0] // case.heads[1]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = scores if bias is None else scores + bias
    empty = jnp.asarray(~seen.any(-1))
    scores = jnp.where(seen | empty[..., None], scores, -jnp.inf)
    output = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    lse = jax.nn.logsumexp(scores, axis=-1)
    output = jnp.where(empty.transpose(0, 2, 1)[..., None], 0, output)
    return output, jnp.where(empty, -jnp.inf, lse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_autodiff_of_the_definition(case: Case, seed: int):
    inputs = make_inputs(case, seed)
    results = oracle(case, inputs)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        primals = [inputs.query, inputs.key, inputs.value]
        primals += [] if inputs.bias is None else [inputs.bias]
        seen = visible(case, inputs.mask)
        values, pull_back = jax.vjp(
            lambda *primals: definition(case, seen, *primals),
            *(jnp.asarray(x.astype(np.float64)) for x in primals),
        )
        bars = [jnp.asarray(x.astype(np.float64)) for x in (inputs.output_bar, inputs.lse_bar)]
        expected = (*values, *pull_back(tuple(bars)))
    assert list(results) == list(NAMES[: len(expected)])
    for name, value in zip(NAMES, expected, strict=False):
        np.testing.assert_allclose(results[name], value, rtol=1e-11, atol=1e-12, err_msg=name)


def test_the_ordinary_computation_rounds_to_the_storage_type(seed: int):
    case = Case(dtype="bf16", query_length=40, key_length=50)
    inputs = make_inputs(case, seed)
    exact, usual = oracle(case, inputs), ordinary(case, inputs)
    for name in ("output", "dq", "dk", "dv"):
        error = np.abs(usual[name] - exact[name]).max() / np.abs(exact[name]).max()
        assert 2e-4 < error < 2e-2, name
