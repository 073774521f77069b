"""Tests JAX's transformations of the default path."""

from __future__ import annotations

import functools
import itertools
import logging
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fa4_jax
from fa4_jax import attention
from fa4_jax import lse as lse_merging

SHAPES = ((2, 9, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8))
OPTIONS: dict[str, Any] = {"is_causal": True, "query_offset": 2}


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def both(*args: jax.Array, **options: Any) -> Any:
    return attention(*args, return_residual=True, **(OPTIONS | options))


def loss(*args: jax.Array, **options: Any) -> Any:
    output, lse = both(*args, **options)
    return (output**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum() ** 2


def assert_trees_close(actual: Any, expected: Any) -> None:
    """Checks equality up to float32 rounding of sums whose terms are as large as the largest
    result.
    """

    def close(a: jax.Array, b: jax.Array) -> None:
        largest = np.abs(np.asarray(b)).max(initial=0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * (1 + largest))

    jax.tree.map(close, actual, expected)


AXES = [*[*itertools.product((0, None), repeat=3)][:-1], (1, 0, 2), (2, 1, None)]


@pytest.mark.parametrize("mapped", AXES, ids=str)
def test_vmap_of_any_operands_equals_a_loop(mapped: tuple[int | None, ...], rng):
    size = 3
    args = [
        normal(rng, shape if axis is None else (*shape[:axis], size, *shape[axis:]))
        for shape, axis in zip(SHAPES, mapped, strict=True)
    ]

    def instance(i: int) -> list[jax.Array]:
        return [
            x if axis is None else jnp.take(x, i, axis)
            for x, axis in zip(args, mapped, strict=True)
        ]

    gradient = jax.grad(loss, (0, 1, 2))
    actual = jax.jit(jax.vmap(lambda *x: (both(*x), gradient(*x)), mapped))(*args)
    each = jax.jit(lambda *x: (both(*x), gradient(*x)))
    expected = [each(*instance(i)) for i in range(size)]
    assert_trees_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))
    total = jax.jit(jax.grad(lambda *x: jax.vmap(loss, mapped)(*x).sum(), (0, 1, 2)))(*args)
    summed = tuple(
        sum(e[1][i] for e in expected) if axis is None else jnp.moveaxis(actual[1][i], 0, axis)
        for i, axis in enumerate(mapped)
    )
    assert_trees_close(total, summed)


@pytest.mark.parametrize("mapped", AXES[:-2], ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["", "bias"])
def test_vmap_over_an_axis_of_size_zero(mapped: tuple[int | None, ...], dense: bool):
    shapes = ((2, 9, 4, 8), (2, 12, 2, 8), (2, 12, 2, 16))
    args = [
        jnp.ones(shape if axis is None else (0, *shape))
        for shape, axis in zip(shapes, mapped, strict=True)
    ]
    bias: Any = jnp.ones((1, 1, 9, 12)) if dense else None

    def run(*args: jax.Array) -> Any:
        return both(*args, bias), jax.grad(loss, (0, 1, 2))(*args, bias)

    (output, lse), gradients = jax.vmap(run, mapped)(*args)
    assert output.shape == (0, 2, 9, 4, 16) and lse.shape == (0, 2, 4, 9)
    assert [x.shape for x in gradients] == [(0, *shape) for shape in shapes]
    total = jax.grad(lambda *x: jax.vmap(loss, (*mapped, None))(*x, bias).sum(), (0, 1, 2))(*args)
    for x, y in zip(total, args, strict=True):
        assert x.shape == y.shape and not x.any()


def test_vmap_over_queries_with_values_of_another_head_dim(rng):
    """Batched queries of the same keys become heads; their output is as wide as value."""
    shapes = (3, 2, 20, 4, 24), (2, 30, 2, 24), (2, 30, 2, 16)
    q, k, v = (normal(rng, shape) for shape in shapes)
    actual = jax.vmap(attention, (0, None, None))(q, k, v)
    expected = jnp.stack([attention(each, k, v) for each in q])
    assert actual.shape == (3, 2, 20, 4, 16)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_vmap_over_lengths_and_offsets(rng):
    q, k, v = (normal(rng, shape) for shape in SHAPES)
    lengths = jnp.array([[12, 5], [0, 12], [7, 7]], jnp.int32)
    offsets = jnp.array([0, 3, -4], jnp.int32)

    @jax.jit
    def run(q: jax.Array, lengths: jax.Array, offset: jax.Array) -> Any:
        return jax.value_and_grad(loss, (0, 1, 2))(
            q, k, v, key_value_seq_lengths=lengths, query_offset=offset
        )

    actual = jax.vmap(run, (None, 0, 0))(q, lengths, offsets)
    expected = [run(q, *x) for x in zip(lengths, offsets, strict=True)]
    assert_trees_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))
    queries = jnp.stack([q, 2 * q, q - 1])
    actual = jax.vmap(run)(queries, lengths, offsets)
    expected = [run(*x) for x in zip(queries, lengths, offsets, strict=True)]
    assert_trees_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))


def test_vmap_over_bias_and_mask(rng):
    q, k, v = (normal(rng, shape) for shape in SHAPES)
    bias, mask = normal(rng, (3, 1, 4, 9, 12)), jnp.asarray(rng.random((3, 2, 1, 1, 12)) < 0.6)

    @jax.jit
    def run(bias: jax.Array, mask: jax.Array) -> Any:
        return jax.value_and_grad(loss, (0, 1, 2, 3))(q, k, v, bias, mask=mask)

    for axes in ((0, 0), (0, None), (None, 0)):
        args = [x if axis == 0 else x[0] for x, axis in zip((bias, mask), axes, strict=True)]
        expected = [
            run(*(x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True)))
            for i in range(3)
        ]
        actual = jax.vmap(run, axes)(*args)
        assert_trees_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))


def test_nested_vmap(rng):
    q = normal(rng, (3, 2, *SHAPES[0]))
    k, v = normal(rng, (2, *SHAPES[1])), normal(rng, SHAPES[2])
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    actual = jax.vmap(jax.vmap(gradient, (0, 0, None)), (0, None, None))(q, k, v)
    expected = [[gradient(q[i, j], k[j], v) for j in range(2)] for i in range(3)]
    rows = [jax.tree.map(lambda *x: jnp.stack(x), *row) for row in expected]
    assert_trees_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *rows))


def test_jit_value_and_grad_scan_and_remat_agree(rng):
    args = [normal(rng, shape) for shape in SHAPES]
    expected = jax.value_and_grad(loss, (0, 1, 2))(*args)  # without jit
    variants = [loss]
    variants += [jax.checkpoint(loss, policy=p) for p in (None, fa4_jax.save_attention_policy)]
    for variant in variants:
        assert_trees_close(jax.jit(jax.value_and_grad(variant, (0, 1, 2)))(*args), expected)
    layers = [normal(rng, (3, *shape)) for shape in SHAPES]

    def scanned(*layers: jax.Array) -> Any:
        return jax.lax.scan(lambda sum_, x: (sum_ + loss(*x), None), 0.0, layers)[0]

    def looped(*layers: jax.Array) -> Any:
        return sum((loss(*(x[i] for x in layers)) for i in range(3)), jnp.zeros(()))

    assert_trees_close(
        jax.jit(jax.value_and_grad(scanned, (0, 1, 2)))(*layers),
        jax.jit(jax.value_and_grad(looped, (0, 1, 2)))(*layers),
    )


def test_without_a_batch_axis(rng):
    q, k, v = (normal(rng, shape[1:]) for shape in SHAPES)
    bias = normal(rng, (4, 9, 12))
    output, lse = both(q, k, v, bias)
    expected, expected_lse = both(q[None], k[None], v[None], bias[None])
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(lse, expected_lse[0])
    assert output.shape == q.shape and lse.shape == (4, 9) and lse.dtype == jnp.float32


def test_a_traced_offset_equals_a_static_one(rng):
    args = [normal(rng, shape) for shape in SHAPES]
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    traced = jax.jit(
        jax.value_and_grad(lambda q, k, v, x: loss(q, k, v, query_offset=x), (0, 1, 2))
    )

    def static(offset: int) -> Any:
        return jax.jit(jax.value_and_grad(lambda *x: loss(*x, query_offset=offset), (0, 1, 2)))

    assert_trees_close(traced(*args, jnp.int32(2)), run(*args))
    for offset in (-20, 5):
        expected = static(offset)(*args)
        assert_trees_close(traced(*args, jnp.int32(offset)), expected)
        per_batch = jnp.array([offset, offset], jnp.int32)
        assert_trees_close(traced(*args, per_batch), expected)


def test_a_step_of_decoding_compiles_nothing(rng, caplog):
    q, k, v = (normal(rng, (2, n, 4, 8)) for n in (1, 12, 12))
    decode = functools.partial(both, is_causal=True)

    def step(offset: Any) -> Any:
        return decode(q, k, v, query_offset=offset), jax.grad(loss)(q, k, v, query_offset=offset)

    step(0)
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        for offset in (1, 2, 3, np.int64(4)):
            step(offset)
        assert not [r.getMessage() for r in caplog.records if "ompiling" in r.getMessage()]
        attention(q, k[:, :5], v[:, :5])
        assert [r.getMessage() for r in caplog.records if "ompiling" in r.getMessage()]


@pytest.mark.parametrize("dense", [False, True], ids=["", "bias"])
def test_a_traced_scale_and_its_gradient(dense: bool, rng):
    q, k, v = (normal(rng, shape) for shape in SHAPES)
    bias: Any = normal(rng, (2, 4, 9, 12)) if dense else None
    # Rows that see no key, and padding, may hold anything.
    q, options = q.at[1, 7:].set(jnp.nan), {"query_seq_lengths": jnp.array([9, 7])}
    options |= {"query_offset": jnp.array([-2, 2])}
    q = q.at[0, :2].set(jnp.nan)

    def run(scale: Any, q: jax.Array, k: jax.Array) -> Any:
        return loss(q, k, v, bias, scale=scale, **options)

    value, (scale_bar, q_bar, k_bar) = jax.jit(jax.value_and_grad(run, (0, 1, 2)))(0.3, q, k)
    expected = jax.value_and_grad(functools.partial(run, 0.3), (0, 1))(q, k)
    assert_trees_close((value, (q_bar, k_bar)), expected)
    slope = (run(0.31, q, k) - run(0.29, q, k)) / 0.02
    np.testing.assert_allclose(scale_bar, slope, rtol=1e-2)
    # Scaling the query has the same effect.
    scaled = jax.grad(lambda scale: run(1.0, scale * jnp.nan_to_num(q), k))(0.3)
    np.testing.assert_allclose(scale_bar, scaled, rtol=1e-4)
    scales = jnp.array([0.3, 0.5, -0.2])
    both_ways = jax.jit(jax.value_and_grad(run, (0, 1)))
    batched = jax.vmap(both_ways, (0, None, None))(scales, q, k)
    each = [both_ways(scale, q, k) for scale in scales]
    assert_trees_close(batched, jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_float64(rng):
    q, k, v = (rng.normal(size=shape) for shape in SHAPES)
    bias = rng.normal(size=(1, 4, 9, 12))

    def ordinary(q: Any, k: Any, v: Any, bias: Any, scale: Any) -> Any:
        """Computes `both` with whole matrices."""
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        seen = jnp.tri(9, 12, 2, bool)
        scores = jnp.where(seen, scale * jnp.einsum("btnh,bsnh->bnts", q, k) + bias, -jnp.inf)
        lse = jax.nn.logsumexp(scores, -1)
        return jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - lse[..., None]), v), lse

    def squares(function: Any, *args: Any) -> Any:
        output, lse = function(*args)
        return (output**2).sum() + lse.sum() ** 2

    with jax.enable_x64(True):
        args = tuple(map(jnp.asarray, (q, k, v, bias, np.float64(0.3))))
        ours = lambda *x: both(*x[:4], scale=x[4])  # noqa: E731
        output, lse = ours(*args)
        assert output.dtype == lse.dtype == jnp.float64
        gradients = [
            jax.jit(jax.grad(functools.partial(squares, function), (0, 1, 2, 3, 4)))(*args)
            for function in (ours, ordinary)
        ]
        found, expected = (output, lse, *gradients[0]), (*ordinary(*args), *gradients[1])
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == jnp.float64
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
        merged = lse_merging.merge(output, lse, output, lse)
        assert merged[0].dtype == merged[1].dtype == jnp.float64
        assert both(q[:, :0], k, v)[1].dtype == jnp.float64


NUMBERS = {"query_offset": [3, -2], "query_seq_lengths": [9, 5], "key_value_seq_lengths": [4, 12]}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", ["int16", "uint8", "int64", "uint64", "list"])
def test_integers_of_any_type(name: str, dtype: str, rng):
    args = [normal(rng, shape) for shape in SHAPES]
    numbers = [abs(x) for x in NUMBERS[name]]
    expected = both(*args, **{name: jnp.asarray(numbers, jnp.int32)})
    given = numbers if dtype == "list" else np.asarray(numbers, dtype)
    run = jax.jit(lambda numbers: both(*args, **{name: numbers}))
    assert_trees_close(both(*args, **{name: given}), expected)
    with jax.enable_x64(True):
        assert_trees_close(run(given), expected)


@pytest.mark.parametrize("name", NUMBERS)
def test_lists_of_traced_and_other_numbers(name: str, rng):
    args = [normal(rng, shape) for shape in SHAPES]
    first, second = NUMBERS[name]
    expected = both(*args, **{name: jnp.asarray([first, second], jnp.int32)})
    for make in (lambda x: [x, x - first + second], lambda x: (x, np.int64(second))):
        run = jax.jit(lambda x, make=make: both(*args, **{name: make(x)}))
        assert_trees_close(run(first), expected)
        with jax.enable_x64(True):
            assert_trees_close(run(first), expected)


@pytest.mark.parametrize("x64", [False, True])
def test_the_index_of_a_loop_is_an_offset(x64: bool, rng):
    q, k, v = (normal(rng, shape) for shape in SHAPES)
    expected = sum(both(q, k, v, query_offset=i)[0] for i in range(3))

    @jax.jit
    def run(q: jax.Array) -> jax.Array:
        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            return total + both(q, k, v, query_offset=i)[0]

        return jax.lax.fori_loop(0, 3, step, jnp.zeros_like(q))

    with jax.enable_x64(x64):
        np.testing.assert_allclose(run(q), expected, rtol=1e-5, atol=1e-5)


def test_traced_numbers_beyond_int32_are_clipped_not_wrapped(rng):
    args = [normal(rng, shape) for shape in SHAPES]
    expected = both(*args)
    with jax.enable_x64(True):
        for name, sign in (("query_offset", 1), ("key_value_seq_lengths", 1), ("query_offset", -1)):
            run = jax.jit(lambda x, name=name: both(*args, is_causal=False, **{name: x}))
            found = run(jnp.full(2, sign * (2**32 + 1), jnp.int64))
            assert_trees_close(found, both(*args, is_causal=False))
    causal = jax.jit(lambda x: both(*args, query_offset=x))
    with jax.enable_x64(True):
        assert not causal(-(2**32))[0].any()
        assert_trees_close(causal(2**32), both(*args, query_offset=12))
    assert_trees_close(causal(2), expected)


def test_the_gradient_of_the_log_sum_exp_flows(rng):
    q, k, v = (normal(rng, shape) for shape in SHAPES)

    def total(q: jax.Array) -> Any:
        return (both(q, k, v)[1] ** 2).sum()

    gradient = jax.grad(total)(q)
    step = 1e-2 * gradient / jnp.linalg.norm(gradient)
    slope = (gradient * step).sum()
    difference = (total(q + step) - total(q - step)) / 2
    np.testing.assert_allclose(slope, difference, rtol=1e-2)


def test_an_exported_program_runs_in_a_fresh_process(rng, tmp_path: pathlib.Path):
    args = [normal(rng, shape) for shape in SHAPES]
    exported = jax.export.export(jax.jit(jax.value_and_grad(loss, (0, 1, 2))))(*args)
    (tmp_path / "program").write_bytes(exported.serialize())
    value, gradients = exported.call(*args)
    np.savez(tmp_path / "data.npz", *args, *gradients, value)
    script = """
import sys, jax, jax.export, numpy as np
import fa4_jax
path = sys.argv[1]
data = list(np.load(path + "/data.npz").values())
program = jax.export.deserialize(bytearray(open(path + "/program", "rb").read()))
value, gradients = program.call(*data[:3])
for actual, expected in zip((*gradients, value), data[3:], strict=True):
    np.testing.assert_array_equal(actual, expected)
"""
    root = pathlib.Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
