"""`decode` on meshes of four devices: shared out by batch and heads, and by pages."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import PagedCache, decode, parallel
from fa4_jax.conformance.paged import Cache, PagedCase, make_cache, verdicts

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
NUMBERS = r"= s32\[\]\S* all-reduce"
"""The all-reduce of the number of blocks of pages, which a loop of the compiler's needs."""


def make_mesh(kind: AxisType) -> Mesh:
    kinds = (AUTO if kind is MANUAL else kind,) * 2
    return jax.make_mesh((2, 2), ("x", "y"), kinds, devices=jax.devices()[:4])


def collectives(program: Any) -> set[str]:
    """Returns the names of a program's collectives, without those of NUMBERS."""
    lines = [x for x in program.as_text().splitlines() if not re.search(NUMBERS, x)]
    return {name for name in COLLECTIVES for x in lines if re.search(rf" {name}(-start)?\(", x)}


XY = P("x", None, "y")
LAYOUTS = {
    # Heads, and specs of query, pages and what has a batch axis.
    "batch": ((4, 2), P("x"), P(), P("x")),
    "batch and heads": ((4, 2), XY, P(None, None, "y"), P("x")),
    "one KV head": ((4, 1), XY, P(), P("x")),
    "batch on both axes": ((4, 2), P(("x", "y")), P(), P(("x", "y"))),
}
CASES = {
    "row": PagedCase(lengths=(70, 17, 0, 33), sinks=True),
    "drafts": PagedCase(
        lengths=(70, 17, 3, 33), rows=4, query_lengths=(4, 2, 4, 1), window=30, dtype="bf16"
    ),
    "fp8": PagedCase(lengths=(70, 17, 0, 33), scales="PK", dtype="bf16"),
}


def assert_right(case: PagedCase, cache: Cache, output: Any, lse: Any) -> None:
    found = verdicts(case, cache.inputs, output, lse)
    assert [v for v in found if v.failure is not None] == []


# The caller's own shard_map shares out what it can by itself: no pages of two KV heads to one.
MANUAL_LAYOUTS = [name for name in LAYOUTS if name != "one KV head"]


@pytest.mark.parametrize(
    ("kind", "layout", "name"),
    [
        *itertools.product((AUTO, EXPLICIT), LAYOUTS, CASES),
        *itertools.product((MANUAL,), MANUAL_LAYOUTS, ("row", "drafts")),
    ],
    ids=str,
)
def test_batch_and_heads(kind, layout, name, seed):
    heads, *specs = LAYOUTS[layout]
    check_layout(kind, dataclasses.replace(CASES[name], heads=heads), specs, seed)


def check_layout(kind: AxisType, case: PagedCase, specs: Any, seed: int) -> None:
    """Checks numbers and types, and that nothing is exchanged."""
    rows, pages, batch = specs
    cache = make_cache(case, seed)
    mesh = make_mesh(kind)
    options = {k: v for k, v in cache.options.items() if isinstance(v, np.ndarray)}
    static = {k: v for k, v in cache.options.items() if k not in options}
    heads_axis = rows[2] if len(rows) > 2 else None
    where_options = {"sinks": P(heads_axis), "query_lengths": batch}
    where_options |= dict.fromkeys(("key_scale", "value_scale"), P(None, *pages[2:]))
    where = (rows, pages, pages, batch, batch), {k: where_options[k] for k in options}
    results = rows, P(rows[0], heads_axis)

    def run(arrays: Any, options: Any) -> Any:
        return decode(*arrays, return_residual=True, **options, **static)

    if kind is MANUAL:
        run = jax.shard_map(run, mesh=mesh, in_specs=where, out_specs=results)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), (cache.arrays, options), where
    )
    program = jax.jit(run).lower(*placed).compile()
    found = program(*placed)
    assert_right(case, cache, *found)
    assert collectives(program) == set()
    for x, spec in zip(found, results, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


def test_explicit_pages_must_be_whole():
    mesh = make_mesh(EXPLICIT)
    cache = make_cache(PagedCase(lengths=(70, 17, 0, 33), table_pages=4, page=32), 0)
    pages = jnp.zeros((16, 32, 2, 16))
    arrays = [*cache.arrays]
    for spec, message in (
        (P("x"), "key_pages is sharded along its pages, over mesh axis 'x'.*local_decode"),
        (P(None, "x"), "key_pages is sharded along its tokens of a page"),
        (P(None, None, None, "x"), "key_pages is sharded along its head_dim"),
    ):
        arrays[1] = arrays[2] = jax.device_put(pages, NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=message):
            decode(*arrays)


DEALT = {
    "row": PagedCase(page=4, table_pages=12, lengths=(47, 17, 0, 4), sinks=True),
    "drafts": PagedCase(page=4, table_pages=12, lengths=(48, 17, 3, 33), rows=5, dtype="bf16"),
    "window": PagedCase(
        page=4,
        table_pages=12,
        lengths=(48, 18, 3, 33),
        rows=3,
        window=9,
        query_lengths=(3, 1, 2, 3),
    ),
    "prefill": PagedCase(page=4, table_pages=12, lengths=(40, 18, 3, 0), rows=40),
}


@pytest.mark.parametrize(
    ("kind", "devices", "name"),
    [*((AUTO, 4, name) for name in DEALT), (AUTO, 2, "drafts"), (EXPLICIT, 2, "window")],
    ids=str,
)
def test_pages_dealt_out(kind, devices, name, seed):
    """Each device of an axis has its own pages, table and pool; lengths are those of sequences."""
    case = DEALT[name]
    cache = make_cache(case, seed)
    mesh = jax.make_mesh(
        (4 // devices, devices), ("data", "keys"), (kind,) * 2, devices=jax.devices()[:4]
    )
    entries = -(-case.table_pages // devices)

    def run(query, key, value, lengths, options):
        held = PagedCache.empty(
            len(lengths),
            num_pages=entries * len(lengths),
            max_pages=entries,
            page_size=case.page,
            layers=1,
            heads=case.heads[1],
            head_dim=case.head_dim,
            dtype=key.dtype,
            axis="keys",
        )
        held = held.grow(lengths).append(0, key, value, lengths)
        found = parallel.local_decode(
            *(query, *held.pages(0), held.page_table, held.lengths),
            axis="keys",
            return_residual=True,
            **options,
            **static,
        )
        return *found, held.is_exhausted

    options = {k: v for k, v in cache.options.items() if isinstance(v, np.ndarray)}
    static = {k: v for k, v in cache.options.items() if k not in options}
    data = P("data")
    specs = {"query_lengths": data, "sinks": P()}
    where = (data, data, data, data, {k: specs[k] for k in options})
    mapped = jax.shard_map(run, mesh=mesh, in_specs=where, out_specs=data)
    inputs = cache.inputs
    arguments = cache.query, inputs.key, inputs.value, cache.lengths, options
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arguments, where
    )
    program = jax.jit(mapped).lower(*placed).compile()
    output, lse, is_exhausted = program(*placed)
    assert_right(case, cache, output, lse)
    assert not is_exhausted.any()
    assert collectives(program) == {"all-reduce"}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_on_a_mesh(kind, dtype, seed):
    """Its pages are sharded by heads; no more of them moves than what the entries write."""
    rng = np.random.default_rng(seed)
    mesh = make_mesh(kind)
    sizes: dict[str, Any] = {"num_pages": 64, "max_pages": 4, "page_size": 4, "layers": 1}
    cache = PagedCache.empty(4, **sizes, heads=2, head_dim=8, dtype=jnp.dtype(dtype))
    heads = P(None, None, "y")
    specs = PagedCache((heads,), (heads,), P(), P(), P())  # pyright: ignore[reportArgumentType]

    def step(cache: PagedCache, query: jax.Array, key: jax.Array, parents: jax.Array) -> Any:
        cache = cache.reorder(parents).grow(1).append(0, key, key)
        return cache, decode(query, *cache.pages(0), cache.page_table, cache.lengths)

    rows = [jnp.asarray(rng.normal(size=(4, 1, n, 8)), dtype) for n in (4, 2)]
    parents = jnp.asarray([0, 0, 3, 1])
    where = specs, XY, XY, P()
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), (cache, *rows, parents), where
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, XY))
    program = jax.jit(step, out_shardings=shardings).lower(*placed).compile()
    text = program.as_text() or ""
    moved = re.findall(rf"= \w+\[([\d,]*)\]\S* (?:{'|'.join(COLLECTIVES)})", text)
    sizes_moved = [np.prod([int(x) for x in shape.split(",") if x]) for shape in moved]
    assert max(sizes_moved) <= 4 * 4 * 2 * 8  # the pages that the entries write, of 64
    plain = jax.jit(step)
    for _ in range(6):
        placed = (program(*placed)[0], *placed[1:])
        cache = plain(cache, *rows, parents)[0]
    found, expected = program(*placed), plain(cache, *rows, parents)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (x, y)), rtol=1e-2)
