"""Every wrong argument of `decode` and of `PagedCache` is an error that names it and its value."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from fa4_jax import PagedCache, decode, parallel

B, T, N, K, H, P, PAGE, M = 2, 3, 4, 2, 16, 5, 8, 4
FP8 = jnp.float8_e4m3fn


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def int32(*values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def call(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "query": zeros(B, T, N, H),
        "key_pages": zeros(P, PAGE, K, H),
        "value_pages": zeros(P, PAGE, K, H),
        "page_table": np.zeros((B, M), np.int32),
        "lengths": int32(7, 32),
    }
    return decode(**(arguments | changes))


def pages(*shape: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    return {"key_pages": zeros(*shape, dtype=dtype), "value_pages": zeros(*shape, dtype=dtype)}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"query": zeros(T, N, H)}, r"query .*\[B, T, N, H\].*\(3, 4, 16\)"),
    ({"query": zeros(B, T, N, H, dtype=jnp.int32)}, "query .*int32"),
    ({"query": zeros(B, T, 0, H)}, r"query .*\(2, 3, 0, 16\)"),
    ({"query": zeros(B, T, 3, H)}, r"query has 3 heads.* 2"),
    ({"query": zeros(B, T, N, 8)}, r"key_pages has head_dim 16 .* 8"),
    ({"query": zeros(B, T, N, H, dtype=jnp.bfloat16)}, "key_pages .*float32.*bfloat16"),
    ({"key_pages": zeros(P, PAGE, H)}, r"key_pages .*\[P, page, K, H\].*\(5, 8, 16\)"),
    ({"value_pages": zeros(P, PAGE, K * H)}, r"value_pages .*\(5, 8, 32\)"),
    (pages(0, PAGE, K, H), r"key_pages .*\(0, 8, 2, 16\)"),
    (pages(P, 0, K, H), r"key_pages .*\(5, 0, 2, 16\)"),
    ({"value_pages": zeros(P, 4, K, H)}, r"value_pages .*\(5, 4, 2, 16\).*\(5, 8, 2, 16\)"),
    ({"value_pages": zeros(P, PAGE, K, H, dtype=FP8)}, "value_pages .*float8_e4m3fn.*float32"),
    ({"page_table": np.zeros((B, M), np.int64)}, "page_table .*int64"),
    ({"page_table": np.zeros((B, M), np.float32)}, "page_table .*float32"),
    ({"page_table": [[0] * M] * B}, "page_table .*int64"),
    ({"page_table": np.zeros((3, M), np.int32)}, r"page_table .*\(2, M\).*\(3, 4\)"),
    ({"page_table": int32(0, 1)}, r"page_table .*\(2, M\).*\(2,\)"),
    ({"lengths": None}, "lengths .*None"),
    ({"lengths": int32(1)}, r"lengths .*\(2,\).*\(1,\)"),
    ({"lengths": np.ones(B)}, "lengths .*float64"),
    ({"lengths": int32(3, -2)}, r"lengths .*\[3, -2\]"),
    ({"lengths": [0, 2**40]}, f"lengths .*{2**40}"),
    ({"query_lengths": int32(1)}, r"query_lengths .*\(2,\).*\(1,\)"),
    ({"query_lengths": int32(3, -2)}, r"query_lengths .*\[3, -2\]"),
    ({"scale": 0.0}, r"scale .*0\.0"),
    ({"local_window_size": -1}, "local_window_size .*-1"),
    ({"local_window_size": (1, 2, 3)}, r"local_window_size .*\(1, 2, 3\)"),
    ({"logits_soft_cap": -1.0}, r"logits_soft_cap .*-1\.0"),
    ({"sinks": zeros(3)}, r"sinks .*\(4,\).*\(3,\)"),
    ({"key_scale": np.ones(K, np.float32)}, "key_scale goes with pages of float8_e4m3fn"),
    (pages(P, PAGE, K, H, dtype=FP8) | {"key_scale": zeros(3)}, r"key_scale .*\(5, 2\).*\(3,\)"),
    (
        pages(P, PAGE, K, H, dtype=FP8) | {"value_scale": zeros(P, K, dtype=jnp.bfloat16)},
        "value_scale .*bfloat16",
    ),
    ({"return_residual": 1}, "return_residual .*1"),
    ({"implementation": "cuda"}, "implementation .*'cuda'"),
    ({"check": "yes"}, "check .*yes"),
]


@pytest.mark.parametrize(
    ("changes", "message"), WRONG, ids=lambda x: x if type(x) is str else "-".join(x)
)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_wrong(changes: dict[str, Any], message: str, jitted: bool):
    run = jax.jit(lambda: call(**changes)) if jitted else lambda: call(**changes)
    with pytest.raises(ValueError) as error:
        run()
    assert re.search(message, str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": zeros(B, T, N, H, dtype=FP8)}, "query .*float8_e4m3fn; supported: bfloat16"),
        (pages(P, PAGE, K, H, dtype=jnp.float8_e5m2), "key_pages .*float8_e5m2.*float8_e4m3fn"),
        (
            {"implementation": "kernel"},
            "query dtype f32: the kernels take bf16 and fp16; implementation=None or 'xla'",
        ),
        ({"page_table": jax.ShapeDtypeStruct((B, 2**26), jnp.int32)}, f"{2**26} pages of 8 tokens"),
    ],
    ids=["query", "pages", "kernel", "table"],
)
def test_not_implemented(changes: dict[str, Any], message: str):
    with pytest.raises(NotImplementedError, match=message):
        traced = {k: v for k, v in changes.items() if isinstance(v, jax.ShapeDtypeStruct)}
        static = {k: v for k, v in changes.items() if k not in traced}
        jax.eval_shape(lambda traced: call(**static, **traced), traced)


def test_symbolic_sizes_are_not_implemented():
    (b,) = jax.export.symbolic_shape("b")
    shapes = {
        "query": jax.ShapeDtypeStruct((b, T, N, H), jnp.float32),
        "page_table": jax.ShapeDtypeStruct((b, M), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((b,), jnp.int32),
    }
    with pytest.raises(NotImplementedError, match="decode takes no symbolic batch, got b"):
        jax.export.export(jax.jit(lambda x: call(**x)))(shapes)


def test_there_is_no_derivative():
    with pytest.raises(NotImplementedError, match=r"no derivative: fa4_jax\.attention"):
        jax.grad(lambda query: call(query=query).sum())(zeros(B, T, N, H))
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.jit(jax.jacfwd(lambda x: call(**pages(P, PAGE, K, H), scale=x)))(1.0)


UNCHECKED: list[tuple[dict[str, Any], str]] = [
    ({"lengths": int32(7, 33)}, r"lengths must be within 0 to 32, got 33 at"),
    ({"page_table": int32([0, 0, 9, 9], [1, 2, 5, 4])}, "page_table must be within 0 to 4, got 5"),
    (
        {"page_table": int32([-1, 9, 9, 9], [1, 2, 3, 4])},
        "page_table must be within 0 to 4, got -1",
    ),
    ({"query_lengths": int32(4, 0)}, "query_lengths must be within 0 to 3, got 4"),
]


@pytest.mark.parametrize(("changes", "message"), UNCHECKED, ids=lambda x: str(x)[:20])
def test_values_out_of_range_are_clamped_or_named(changes: dict[str, Any], message: str):
    assert np.isfinite(call(**changes)).all()
    with pytest.raises(ValueError, match=message):
        call(**changes, check=True)
    checked = checkify.checkify(jax.jit(lambda changes: call(**changes, check=True)))
    error, output = checked(jax.tree.map(jnp.asarray, changes))
    assert re.search(message, error.get() or "")
    np.testing.assert_array_equal(output, call(**changes))


def test_what_is_right_passes_the_check():
    table = int32([4, 99, 99, 99], [1, 2, 0, 4])
    arguments = {"page_table": table, "query_lengths": int32(3, 0)}
    expected = call(**arguments)
    np.testing.assert_array_equal(call(**arguments, check=True), expected)
    checked = checkify.checkify(jax.jit(lambda x: call(**x, check=True)))
    error, _ = checked(jax.tree.map(jnp.asarray, arguments))
    assert error.get() is None


def cache(**changes: Any) -> PagedCache:
    sizes: dict[str, Any] = {
        "num_pages": P,
        "max_pages": M,
        "page_size": PAGE,
        "layers": 1,
        "heads": K,
        "head_dim": H,
        "dtype": jnp.float32,
    }
    return PagedCache.empty(changes.pop("batch", B), **(sizes | changes))


ROWS = zeros(B, T, K, H)
WRONG_CACHES: list[tuple[Any, str]] = [
    (lambda: cache(batch=0), "batch must be an int >= 1, got 0"),
    (lambda: cache(page_size=2.5), r"page_size .*2\.5"),
    (lambda: cache(num_pages=True), "num_pages .*True"),
    (lambda: cache().grow(1.5), "tokens .*float64"),
    (lambda: cache().grow(int32(1, 2, 3)), r"tokens .*\(2,\).*\(3,\)"),
    (lambda: cache().append(0, ROWS[0], ROWS), r"key .*\(2, T, 2, 16\).*\(3, 2, 16\)"),
    (lambda: cache().append(0, ROWS, ROWS[:1]), r"value .*\(2, T, 2, 16\).*\(1, 3, 2, 16\)"),
    (lambda: cache().append(0, ROWS, ROWS[:, :2]), "value has 2 rows but key has 3"),
    (lambda: cache().append(0, ROWS, ROWS.astype(jnp.bfloat16)), "value .*bfloat16.*float32"),
    (lambda: cache().append(1, ROWS, ROWS), "layer must be within 0 to 0, got 1"),
    (lambda: cache().append(0, ROWS, ROWS, int32(1)), r"query_lengths .*\(2,\).*\(1,\)"),
    (lambda: cache().reorder(int32(0)), r"parents .*\(2,\).*\(1,\)"),
    (lambda: cache().reorder(None), "parents .*None"),  # pyright: ignore[reportArgumentType]
    (lambda: cache().release(int32(0, 1)), r"is_finished .*int32\[2\]"),
    (lambda: cache(axis="keys").grow(1), "axis='keys' is no manual mesh axis here"),
]


@pytest.mark.parametrize(("run", "message"), WRONG_CACHES, ids=[x for _, x in WRONG_CACHES])
def test_wrong_caches(run: Any, message: str):
    with pytest.raises(ValueError, match=message):
        run()


def test_parents_beyond_the_batch_are_clamped():
    grown = cache().grow(int32(3, 9))
    assert grown.reorder(int32(7, 0)).lengths.tolist() == [9, 3]


def test_an_axis_that_is_not_there():
    query, table = zeros(B, T, N, H), np.zeros((B, M), np.int32)
    key_pages = zeros(P, PAGE, K, H)
    with pytest.raises(ValueError, match=r"axis='keys' is no manual mesh axis here .*none"):
        parallel.local_decode(query, key_pages, key_pages, table, int32(1, 2), axis="keys")
