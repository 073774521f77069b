"""A mask beside a dense bias that has an element for each of its pairs becomes part of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import attention, bias, explain, masks, supports
from fa4_jax.api import Call, canonicalise, planned
from fa4_jax.conformance.cases import MASKED_BIASES, Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.conformance.runner import call
from fa4_jax.masks import in_bias
from fa4_jax.plan import make_plan
from tests.fakes import fake_target

B, T, S, N, H = 2, 20, 24, 2, 16


def operands(rng: np.random.Generator, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Query, key, value and a bias with an element for each pair."""
    shapes = {"query": (B, T, N, H), "key": (B, S, N, H), "value": (B, S, N, H)}
    shapes["bias"] = (B, N, T, S)
    return {name: jnp.asarray(rng.normal(size=x), dtype) for name, x in shapes.items()}


def masks_of(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments that say what a row sees, by name."""
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (B, S)), axis=1), jnp.int32)
    scattered = jnp.asarray(rng.integers(-1, 3, (B, S)), jnp.int32)
    function = masks.function(lambda b, h, q, k: (q + k + h) % 3 != 0)
    array = jnp.asarray(rng.random((B, 1, T, S)) < 0.6)
    return {
        "array": {"mask": array},
        "keys": {"mask": array[:1, :, :1]},
        "ids": {"segment_ids": (ids[:, :T], ids)},
        "scattered ids": {"segment_ids": (scattered[:, :T], scattered)},
        "function": {"mask": function},
        "array and ids": {"mask": masks.chunked(8) & array, "segment_ids": (ids[:, :T], ids)},
        "either": {"mask": masks.prefix(jnp.asarray([3, 9])) | function},
    }


NAMES = tuple(masks_of(np.random.default_rng(0)))


@pytest.mark.parametrize("name", NAMES)
def test_the_bias_says_the_same(name: str, rng: np.random.Generator) -> None:
    given, options = operands(rng, jnp.bfloat16), masks_of(rng)[name] | {"is_causal": name == "ids"}
    found, problem = in_bias.moved(*canonicalise(Call(**given, **options)))
    assert not (problem.has_mask or problem.has_ranges or problem.has_tags)
    assert found.mask is found.pairs is found.rows is None
    assert found.bias.shape == given["bias"].shape and found.bias.dtype == given["bias"].dtype

    def results(given: dict[str, jax.Array], **options: Any) -> Any:
        return attention(**given, **options, implementation="xla", return_residual=True)

    given = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    with_masks = given | {"bias": found.bias.astype(jnp.float32)}
    plain = {"is_causal": options["is_causal"]}
    expected, transpose = jax.vjp(lambda x: results(x, **options), given)
    moved, other = jax.vjp(lambda x: results(x, **plain), with_masks)
    bars = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), expected)
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(other(bars)), jax.tree.leaves(transpose(bars)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_take_it(name: str, rng: np.random.Generator) -> None:
    given, options = operands(rng, jnp.bfloat16), masks_of(rng)[name]
    _, plan = planned(Call(**given, **options), fake_target(), "kernel")
    assert [kernel.key.bias for kernel in plan.forward] == [True]
    assert any(kernel.key.bias for kernel in plan.backward)
    _, declined = planned(Call(**given, **options), fake_target(), "xla")
    assert declined.problem.has_mask or declined.problem.has_ranges
    assert not declined.forward


@pytest.mark.parametrize("case", MASKED_BIASES, ids=lambda case: case.id)
def test_cases(case: Case) -> None:
    given, problem = canonicalise(call(case, make_inputs(case, 0)))
    assert make_plan(problem, fake_target(), None).forward == ()
    _, moved = in_bias.moved(given, problem)
    assert make_plan(moved, fake_target(), None).forward


def test_what_stays(rng: np.random.Generator) -> None:
    """A bias that is smaller than its mask, or not an array; a prepared mask; no mask at all; and
    what no kernel takes in any case.
    """
    given = operands(rng, jnp.bfloat16)
    array = {"mask": masks_of(rng)["array"]["mask"]}
    ids = masks_of(rng)["ids"]
    function = masks.function(lambda b, h, q, k: q != k)
    prepared = masks.tile_table(function, given["query"], given["key"], arch="sm_90a")
    for changes, options in (
        ({"bias": given["bias"][:1]}, array),
        ({"bias": given["bias"][:1]}, ids),
        ({"bias": given["bias"][:, :, :1]}, array),
        ({"bias": bias.alibi(jnp.ones(N))}, array),
        ({"bias": None}, array),
        ({}, {"mask": prepared}),
        ({}, {}),
        ({}, array | {"sinks": jnp.zeros(N)}),
        (operands(rng), array),
    ):
        before = canonicalise(Call(**(given | changes), **options))
        after = in_bias.moved(*before)
        assert all(a is b for a, b in zip(after, before, strict=True))


def test_the_copy_is_named(rng: np.random.Generator) -> None:
    given, options = operands(rng, jnp.bfloat16), masks_of(rng)["array"]
    assert supports(**given, **options, arch="sm_90a")
    assert not supports(**(given | {"bias": given["bias"][:1]}), **options, arch="sm_90a")
    told = explain(**given, **options, arch="sm_90a")
    assert told.forward and "bias" in told.forward[0]
    (copy,) = (space for space in told.workspaces if space.name == "masked_bias")
    assert (copy.shape, copy.dtype) == ((B, N, T, S), "bf16")
    assert not any(space.name == "mask_bits" for space in told.workspaces)
    plain = explain(**given, arch="sm_90a")
    assert not any(space.name == "masked_bias" for space in plain.workspaces)


def test_in_transformations(rng: np.random.Generator) -> None:
    """Traced, and over an axis of calls."""
    given, options = operands(rng, jnp.bfloat16), masks_of(rng)["array"]

    def moved(bias: jax.Array, mask: jax.Array) -> jax.Array:
        found, _ = in_bias.moved(*canonicalise(Call(**(given | {"bias": bias}), mask=mask)))
        return found.bias

    alone = moved(given["bias"], options["mask"])
    np.testing.assert_array_equal(jax.jit(moved)(given["bias"], options["mask"]), alone)
    both = jnp.stack([given["bias"], 2 * given["bias"]])
    found = jax.vmap(moved, (0, None))(both, options["mask"])
    np.testing.assert_array_equal(found[0], alone)
    assert (jnp.isinf(found[1]) == jnp.isinf(alone)).all()
