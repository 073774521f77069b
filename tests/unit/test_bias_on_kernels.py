"""What kernels read of a bias and return of its gradient, and biases on meshes of four devices.

What kernels compute on meshes is computed by the default path here, which sees each device's part.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import api, attention, bias, bias_buffer, explain, launches, supports, xla
from fa4_jax.boxes import Whole
from fa4_jax.key import (
    BAND_GAP,
    BIAS_GRADIENT_TILES,
    DISTANCE_MARGIN,
    MOST_REACH,
    NO_BAND,
    KernelKey,
    Pass,
)
from fa4_jax.problem import Problem
from tests import example_counts
from tests.fakes import fake_target

BY_ONE = KernelKey("sm_100f", Pass.FORWARD, "bf16", 128, band=True, bias=True)
BY_PAIRS = dataclasses.replace(BY_ONE, arch="sm_90a")
KINDS = [AxisType.Auto, AxisType.Explicit, AxisType.Manual]
LENGTHS = st.integers(1, 200)


@settings(deadline=None, max_examples=example_counts.count(40))
@given(
    rows=LENGTHS, keys=LENGTHS, seed=st.integers(0, 100), key=st.sampled_from([BY_ONE, BY_PAIRS])
)
def test_diagonals_of_tiles_add_up_to_those_of_the_whole(
    rows: int, keys: int, seed: int, key: KernelKey
) -> None:
    """The kernel's halves, made here by their definition, become the sums of whole diagonals."""
    ds = np.random.default_rng(seed).normal(size=(rows, keys)).astype(np.float32)
    of = bias.AtDistances(rows, jnp.zeros((1, 1, rows + keys - 1)), jnp.zeros((1, 1)))
    n, lengths = BIAS_GRADIENT_TILES[key.arch], (rows, keys)
    shape = bias_buffer.gradient_shape(bias_buffer.buffer(of, key).shape, lengths, n)
    found = np.zeros(shape[1:5], np.float32)
    assert shape[0] == 0
    if rows == 1 and not key.pairwise_bias:
        found[0, 0, 0] = ds[0]
    else:
        tiles = -(-rows // n), -(-keys // n)
        assert shape[5] == sum(tiles) - 1
        padded = np.zeros((tiles[0] * n, tiles[1] * n), np.float32)
        padded[:rows, :keys] = ds
        for i, j in np.ndindex(*tiles):
            tile = padded[i * n : (i + 1) * n, j * n : (j + 1) * n]
            unit = j - i + tiles[0] - 1
            for t in range(2 * n - 1):
                place = unit * n + t % n
                found[0, 0, t // n, place] += np.trace(tile, t - (n - 1))
    expected = [np.trace(ds, d) for d in range(1 - rows, keys)]
    got = bias_buffer.gradient(of, jnp.asarray(found), lengths, n)
    np.testing.assert_allclose(got.values[0, 0], expected, atol=1e-4)


@pytest.mark.parametrize("count", [8, 9])
def test_every_distance_is_at_an_even_place_of_one_of_two_copies(count: int) -> None:
    values = jnp.arange(1.0, count + 1).reshape(1, 1, count)
    found = bias_buffer.buffer(bias.AtDistances(3, values, jnp.zeros((1, 1))), BY_PAIRS)[0, 0]
    assert found.shape[0] == 3 and found.shape[1] % 2 == 0
    for i in range(-DISTANCE_MARGIN, count + DISTANCE_MARGIN):
        place = DISTANCE_MARGIN + i
        number = found[place % 2, place - place % 2]
        assert number == (i + 1 if 0 <= i < count else 0)


OFFSET = 7
FAR = {
    # slope, low, high and reach
    "alibi": (bias.alibi(jnp.array([0.5])), (0.5, 0, 0, bias_buffer.LINEAR_REACH)),
    "relative": (
        bias.relative(jnp.arange(8.0)[:, None], max_distance=10),
        (0, 3, 7, 10),
    ),
}


@pytest.mark.parametrize("name", FAR)
def test_what_a_score_far_from_the_diagonal_gets(name: str) -> None:
    value, numbers = FAR[name]
    of = bias.AtDistances.of(value.checked((1, 1, 20), 4), (20, 50), jnp.array([OFFSET]))
    found = bias_buffer.buffer(of, BY_PAIRS)
    np.testing.assert_allclose(found[0, 0, 2, : len(numbers)], numbers, rtol=1e-6)
    assert not found[0, 0, 2, len(numbers) :].any()
    slope, low, high, reach = numbers
    for i, j in np.ndindex(20, 50):
        distance = j - i - OFFSET
        if abs(distance) >= reach:
            far = (low if distance < 0 else high) + slope * distance
            np.testing.assert_allclose(of.values[0, 0, j - i + 19], far, rtol=1e-6, atol=1e-6)


def test_of_other_numbers_none_are_far() -> None:
    values = jnp.arange(9.0).reshape(1, 1, 9)
    found = bias_buffer.buffer(bias.AtDistances(3, values, jnp.zeros((1, 1))), BY_PAIRS)
    assert found[0, 0, 2, 3] == MOST_REACH and found[0, 0, 2, 0] == 0


@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.BACKWARD])
def test_a_dense_bias_is_read_in_pairs(pass_: Pass) -> None:
    def shape(of: Any, key: KernelKey) -> Any:
        found = jax.eval_shape(lambda x: bias_buffer.buffer(x, key), of)
        return found.dtype, found.shape

    by_pairs = dataclasses.replace(BY_PAIRS, kernel=pass_)
    whole, odd = (jax.ShapeDtypeStruct((1, 4, 9, keys), jnp.bfloat16) for keys in (16, 11))
    assert shape(whole, by_pairs) == (jnp.bfloat16, (1, 4, 9, 8, 2))
    assert shape(odd, by_pairs) == (jnp.bfloat16, (1, 4, 9, 8, 2))
    assert shape(whole, BY_ONE) == (jnp.float32, whole.shape)
    assert shape(jax.ShapeDtypeStruct(whole.shape, jnp.float16), by_pairs)[0] == jnp.float32
    assert bias_buffer.gradient_shape(odd.shape, (9, 11), 64)[1:5] == odd.shape
    assert bias_buffer.gradient_shape((1, 4, 9, 8, 2), (9, 11), 64)[1:5] == (1, 4, 9, 8)


@pytest.mark.parametrize("keys", [7, 8])
def test_a_gradient_of_pairs_is_taken_apart(keys: int, rng: np.random.Generator) -> None:
    numbers = jnp.asarray(rng.normal(size=(2, 1, 3, 8)), jnp.bfloat16)
    found = jax.lax.bitcast_convert_type(numbers.reshape(2, 1, 3, 4, 2), jnp.float32)
    of = jnp.zeros((2, 1, 3, keys), jnp.bfloat16)
    gradient = bias_buffer.gradient(of, found, (3, keys), 64)
    assert gradient.dtype == of.dtype
    np.testing.assert_array_equal(gradient, numbers[..., :keys])


@pytest.mark.parametrize("keys", range(1, 20))
def test_rows_are_whole_chunks_of_eight_keys(keys: int, rng: np.random.Generator) -> None:
    of = jnp.asarray(rng.normal(size=(2, 1, 3, keys)), jnp.bfloat16)
    found = bias_buffer.buffer(of, BY_PAIRS)
    if found.dtype == jnp.float32:
        assert found.shape == of.shape and keys < 5  # Else kernels would not know them from others.
        return
    padded = found.reshape(2, 1, 3, -1)
    assert found.shape[3] < keys and padded.shape[3] % 8 == 0 <= padded.shape[3] - keys < 8
    np.testing.assert_array_equal(padded[..., :keys], of)
    assert not np.any(padded[..., keys:])


@pytest.mark.parametrize("offset", [np.array([3]), np.array([3, -9])])
def test_at_distances_is_the_bias_that_it_comes_from(
    offset: np.ndarray, rng: np.random.Generator
) -> None:
    sizes, box = (2, 4, 21), Whole(21, 30)
    table = jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)
    slopes = jnp.asarray(rng.normal(size=4), jnp.float32)
    for value in (bias.alibi(slopes), bias.relative(table, max_distance=10)):
        plain = value.checked(sizes, 4)
        made = bias.AtDistances.of(plain, (21, 30), jnp.asarray(offset))
        assert made.values.shape == (len(offset), 4, 50)
        expected = plain.added(box, jnp.asarray(offset))
        np.testing.assert_allclose(made.added(box, jnp.zeros(1, int)), expected, rtol=1e-6)


@pytest.mark.parametrize("first", [0, -4, 3])
def test_a_row_of_a_band_lies_between_zeros(first: int, rng: np.random.Generator) -> None:
    """Kernels find element (row, key) at a place that is linear in both, as far as the zeros go."""
    rows, keys, columns, offset = 7, 40, 6, 20
    table = jnp.asarray(rng.normal(size=(2, 3, rows, columns)), jnp.bfloat16)
    banded: Any = bias.banded(table, first)
    found = bias_buffer.buffer(banded, BY_ONE)
    assert found.dtype == jnp.float32 and found.shape == (2, 3, rows + 1, BAND_GAP + columns)
    expected = np.asarray(banded.added(Whole(rows, keys), jnp.asarray([offset])), np.float32)
    low = offset - first - columns + 1
    plane, step = np.asarray(found[1, 2]).ravel(), found.shape[3] - 1
    for row, key in np.ndindex(rows, keys):
        assert plane[BAND_GAP - low + row * step + key] == expected[1, 2, row, key]
    assert plane[:BAND_GAP].max() == 0 and plane[-BAND_GAP:].max() == 0


def test_hoppers_forward_reads_the_callers_table() -> None:
    table = jnp.arange(24.0).reshape(1, 2, 3, 4)
    assert bias_buffer.buffer(bias.banded(table), BY_PAIRS) is table
    found = bias_buffer.buffer(bias.banded(table.astype(jnp.bfloat16)), BY_PAIRS)
    assert found.dtype == jnp.float32 and np.array_equal(found, table)
    backward = dataclasses.replace(BY_PAIRS, kernel=Pass.BACKWARD)
    assert bias_buffer.buffer(bias.banded(table), backward).shape == (1, 2, 4, BAND_GAP + 4)


@pytest.mark.parametrize("columns", [1, 2, 64, 65, 130])
@pytest.mark.parametrize("n", BIAS_GRADIENT_TILES.values())
def test_every_column_of_a_band_is_in_one_tile_of_its_gradient(n: int, columns: int) -> None:
    rows, table = 70, jax.ShapeDtypeStruct((1, 2, 70, columns), jnp.float32)
    of = jax.eval_shape(lambda x: bias_buffer.buffer(x, BY_ONE), bias.banded(table))
    shape = bias_buffer.gradient_shape(of.shape, (rows, 90), n, is_banded=True)
    assert shape[1:5] == table.shape
    tiles, rest = divmod(shape[5], -(-rows // n))
    # The last row's last column lies n - 1 keys after the first row's.
    assert rest == 0 and tiles * n >= columns + n - 1 > (tiles - 1) * n
    found = jnp.ones(shape[1:5])
    of = bias.banded(table.update(dtype=jnp.bfloat16), -3)
    got = bias_buffer.gradient(of, found, (70, 90), n)
    assert got.first == -3 and got.table.dtype == jnp.bfloat16 and got.table.shape == table.shape


def test_what_says_that_a_bias_is_banded() -> None:
    table = jnp.zeros((1, 1, 4, 5))
    for value, form, first in (
        (bias.banded(table, -2), "banded", -2),
        (bias.banded(table, 2**29), "other", NO_BAND),
        (bias.banded(table[..., :0]), "other", NO_BAND),
        (bias.alibi(jnp.ones(1)), "distance", NO_BAND),
    ):
        assert bias.form(value, 4) == form and bias.first_distance(value, 4) == first


def test_distances_are_exact_where_slopes_have_few_bits() -> None:
    """In bfloat16 the distance 257 would be 256."""
    slopes = jnp.ones(1, jnp.bfloat16)
    made = bias.AtDistances.of(bias.alibi(slopes), (1, 300), jnp.zeros(1, int))
    np.testing.assert_array_equal(made.values[0, 0], np.arange(300))


Q = jax.ShapeDtypeStruct((2, 100, 4, 64), jnp.bfloat16)


def test_explain_names_the_launches_and_their_memory(kernels: list[Problem]) -> None:
    del kernels
    dense = jax.ShapeDtypeStruct((1, 4, 100, 100), jnp.bfloat16)
    told = explain(Q, Q, Q, dense)
    assert told.forward == ("sm_90a_fwd_bf16_d64_band_bias_short",)
    assert told.backward == (
        "sm_90a_bwd_pre_bf16_d64_deterministic",
        "sm_90a_bwd_bf16_d64_band_bias_deterministic",
        "sm_90a_bwd_post_bf16_d64",
        "sm_90a_bias_grad_bf16_d64_band",
    )
    assert "bias: no kernel computes tangents" in str(told.tangent_reason)
    memory = {space.name: space.num_bytes for space in told.workspaces}
    assert "bias" not in memory
    assert memory["bias_padded"] == memory["dbias"] == 4 * 100 * 104 * 2
    assert memory["tile_ticket"] == 4
    key = jax.ShapeDtypeStruct((2, 104, 4, 64), jnp.bfloat16)
    whole = explain(Q, key, key, jax.ShapeDtypeStruct((1, 4, 100, 104), jnp.bfloat16))
    assert not any(space.name == "bias_padded" for space in whole.workspaces)
    wide = jax.ShapeDtypeStruct((2, 100, 4, 256), jnp.bfloat16)
    # Hopper's forward reads fp32 numbers there, its backward pairs of bfloat16.
    copies = {x.name: x for x in explain(wide, wide, wide, dense).workspaces if "bias" in x.name}
    assert (copies["bias"].dtype, copies["bias"].shape) == ("f32", dense.shape)
    assert copies["bias_padded"].shape == (1, 4, 100, 52, 2)
    slopes = jax.ShapeDtypeStruct((4,), jnp.float32)
    told = explain(Q, Q, Q, bias.alibi(slopes), is_causal=True)
    memory = {space.name: space.num_bytes for space in told.workspaces}
    assert memory["bias"] == 4 * 2 * (2 * DISTANCE_MARGIN + 199 + 1) * 4
    # Queries and keys are one tile, whose diagonals have two halves.
    assert memory["dbias"] == 4 * 2 * 1 * BIAS_GRADIENT_TILES["sm_90a"] * 4
    table = jax.ShapeDtypeStruct((2, 1, 100, 30), jnp.float32)
    told = explain(Q, Q, Q, bias.banded(table), is_causal=True)
    memory = {space.name: space.num_bytes for space in told.workspaces}
    assert "bias" not in memory and memory["bias_padded"] == 2 * 101 * (BAND_GAP + 30) * 4
    assert memory["dbias"] == 2 * 100 * 30 * 4
    # Hopper's forward reads a float32 table as it is, and another one converted.
    told = explain(Q, Q, Q, bias.banded(table.update(dtype=jnp.bfloat16)), is_causal=True)
    copies = {x.name: (x.dtype, x.shape) for x in told.workspaces if "bias_" in x.name + "_"}
    assert copies["bias"] == ("f32", table.shape)
    assert copies["bias_padded"] == ("f32", (2, 1, 101, BAND_GAP + 30))


def test_what_no_kernel_takes_is_named(kernels: list[Problem]) -> None:
    del kernels
    dense = jax.ShapeDtypeStruct((1, 4, 100, 100), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 100), jnp.int32)
    beside: list[dict[str, Any]] = [{"segment_ids": ids}, {"logits_soft_cap": 3.0}]
    beside.append({"return_max_logit": True})
    for options in beside:
        assert "bias beside" in str(supports(Q, Q, Q, dense, **options))
    banded = bias.banded(jax.ShapeDtypeStruct((1, 4, 100, 5), jnp.float32))
    assert supports(Q, Q, Q, banded)
    assert "bias beside" in str(supports(Q, Q, Q, banded, segment_ids=ids))
    with pytest.raises(NotImplementedError, match="bias: the kernels take alibi, relative"):
        q = jnp.zeros(Q.shape, Q.dtype)
        attention(q, q, q, jnp.zeros((1, 1, 100, 1)), implementation="kernel")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """Problems that kernels get, which the default path computes in their place."""
    problems: list[Problem] = []
    target = dataclasses.replace(fake_target(), platforms=("cuda", "cpu"))

    def forward(plan: Any, operands: Any) -> Any:
        assert operands.query.shape[::2] == (plan.problem.batch, plan.problem.query_heads)
        problems.append(plan.problem)
        return xla.forward(plan.problem, operands)

    def backward(plan: Any, operands: Any, cotangents: Any) -> Any:
        problems.append(plan.problem)
        return xla.backward(plan.problem, operands, cotangents)

    jax.clear_caches()
    monkeypatch.setattr(api, "current_target", lambda: target)
    monkeypatch.setattr(launches, "forward", forward)
    monkeypatch.setattr(launches, "backward", backward)
    yield problems
    jax.clear_caches()


FORMS = {
    "dense": ((4, 4, 40, 40), P("x", "y")),
    "of all entries": ((1, 4, 40, 40), P(None, "y")),
    "of all heads": ((4, 1, 40, 40), P("x")),
    "of all": ((1, 1, 1, 40), P()),
    "alibi": ((4,), P("y")),
    "relative": ((8, 4), P(None, "y")),
    "banded": ((4, 4, 40, 9), P("x", "y")),
    "banded, of all entries": ((1, 4, 40, 9), P(None, "y")),
    "banded, of all heads": ((4, 1, 40, 9), P("x")),
}


def _value(form: str, array: jax.Array) -> Any:
    if form == "relative":
        return bias.relative(array, max_distance=10)
    if form.startswith("banded"):
        return bias.banded(array, -4)
    return bias.alibi(array) if form == "alibi" else array


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_batch_and_heads(
    kind: AxisType, form: str, kernels: list[Problem], rng: np.random.Generator
) -> None:
    """Devices that share a bias add up their gradients of it."""
    kinds = (AxisType.Auto if kind is AxisType.Manual else kind,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)
    shape, spec = FORMS[form]
    operands = [jnp.asarray(rng.normal(size=(4, 40, 4, 64)), jnp.float16) for _ in range(3)]
    operands.append(jnp.asarray(rng.normal(size=shape), jnp.float32))

    def gradients(*operands: jax.Array) -> Any:
        def loss(*x: jax.Array) -> jax.Array:
            query, key, value, array = x
            out = attention(query, key, value, _value(form, array), is_causal=True)
            return (jnp.cos(out.astype(jnp.float32))).sum()

        return jax.grad(loss, (0, 3))(*operands)

    expected = jax.jit(gradients)(*operands)
    specs = (*(P("x", None, "y"),) * 3, spec)
    placed = [
        jax.device_put(x, NamedSharding(mesh, own)) for x, own in zip(operands, specs, strict=True)
    ]
    kernels.clear()
    run = gradients
    if kind is AxisType.Manual:
        run = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(specs[0], spec))
    with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
        found = jax.jit(run)(*placed)
    for mine, whole in zip(found, expected, strict=True):
        assert mine.shape == whole.shape and mine.dtype == whole.dtype
        np.testing.assert_allclose(
            np.asarray(mine, np.float32),
            np.asarray(whole, np.float32),
            atol=4e-3 * float(np.abs(np.asarray(whole, np.float32)).max()),
        )
    assert kernels and (kernels[-1].batch, kernels[-1].query_heads) == (2, 2)
