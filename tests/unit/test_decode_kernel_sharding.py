"""The kernels of `decode` on meshes of four devices.

The default path stands for every device's kernels: what is tested is which device has which part of
the operands, and that pages do not move.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import api, decode, launches, log, xla
from fa4_jax.conformance.paged import PagedCase, make_cache
from fa4_jax.problem import Problem
from tests.fakes import fake_target
from tests.programs import launched_kernels
from tests.unit.test_decode_sharding import (
    AUTO,
    EXPLICIT,
    LAYOUTS,
    MANUAL,
    MANUAL_LAYOUTS,
    XY,
    assert_right,
    check_layout,
    collectives,
    make_mesh,
)

LOCAL = {
    # Batch, query heads and KV heads of a device.
    "batch": (2, 4, 2),
    "batch and heads": (2, 2, 1),
    "one KV head": (2, 2, 1),
    "batch on both axes": (1, 4, 2),
}
CASES = {
    "row": PagedCase(lengths=(70, 17, 0, 33), dtype="bf16"),
    "drafts": PagedCase(
        lengths=(70, 17, 3, 33), rows=4, query_lengths=(4, 2, 4, 1), window=30, dtype="bf16"
    ),
    "values": PagedCase(lengths=(70, 17, 0, 33), value_dim=24, dtype="fp16"),
    "scores": PagedCase(lengths=(70, 17, 0, 33), sinks=True, soft_cap=2.0, dtype="bf16"),
}


def from_pages(plan: Any, operands: Any, page_table: Any) -> Any:
    """What kernels compute that read pages."""
    pages, page = operands.key.shape[:2]
    table = page_table.clip(0, pages - 1)
    key, value = (
        x[table].reshape(len(table), -1, *x.shape[2:]) for x in (operands.key, operands.value)
    )
    assert plan.problem.page_length == page
    assert plan.problem.batch == len(operands.query)
    assert (plan.problem.query_heads, plan.problem.kv_heads) == (
        operands.query.shape[2],
        key.shape[2],
    )
    return xla.forward(plan.problem, operands._replace(key=key, value=value))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """Makes kernels for everything, on the CPU; their problems are added to the list."""
    target = dataclasses.replace(fake_target(), platforms=("cuda", "cpu"))
    problems: list[Problem] = []

    def forward(plan: Any, *args: Any) -> Any:
        problems.append(plan.problem)
        return from_pages(plan, *args)

    jax.clear_caches()
    monkeypatch.setattr(api, "current_target", lambda: target)
    monkeypatch.setattr(launches, "forward", forward)
    yield problems
    jax.clear_caches()


@pytest.mark.parametrize(
    ("kind", "layout", "name"),
    [
        *itertools.product((AUTO, EXPLICIT), LAYOUTS, CASES),
        *itertools.product((MANUAL,), MANUAL_LAYOUTS, ("drafts",)),
    ],
    ids=str,
)
def test_batch_and_heads(kind, layout, name, seed, launched):
    heads, *specs = LAYOUTS[layout]
    check_layout(kind, dataclasses.replace(CASES[name], heads=heads), specs, seed)
    problem = launched[-1]
    assert (problem.batch, problem.query_heads, problem.kv_heads) == LOCAL[layout]


def test_auto_axes_within_a_shard_map_over_others(seed, launched):
    case = dataclasses.replace(CASES["drafts"], query_lengths=None)
    cache, mesh = make_cache(case, seed), make_mesh(AUTO)
    batch = P("x")
    run = jax.shard_map(
        lambda *arrays: decode(*arrays, local_window_size=30, return_residual=True),
        mesh=mesh,
        in_specs=(batch, P(), P(), batch, batch),
        out_specs=batch,
        axis_names={"x"},
    )
    heads = P(None, None, "y")
    where = (XY, heads, heads, batch, batch)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(cache.arrays, where, strict=True)
    ]
    program = jax.jit(run).lower(*placed).compile()
    assert_right(case, cache, *program(*placed))
    assert collectives(program) == set()
    problem = launched[-1]
    assert (problem.batch, problem.query_heads, problem.kv_heads) == (2, 2, 1)


def test_sharded_pages_are_gathered_which_is_said_once(seed, launched, caplog):
    log.warn_once.cache_clear()
    case = dataclasses.replace(CASES["row"], table_pages=4, lengths=(60, 17, 0, 33))
    cache, mesh = make_cache(case, seed), make_mesh(AUTO)
    key, value = (np.concatenate([x, x[:1]]) for x in (cache.key_pages, cache.value_pages))
    pages = NamedSharding(mesh, P("x"))
    arrays = cache.query, *(jax.device_put(x, pages) for x in (key, value)), *cache.arrays[3:]
    program = jax.jit(lambda *x: decode(*x, return_residual=True)).lower(*arrays).compile()
    assert_right(case, cache, *program(*arrays))
    assert collectives(program) == {"all-gather"}
    messages = [record.getMessage() for record in caplog.records if record.name == "fa4_jax"]
    assert len(messages) == 1
    assert "sharded along their pages, over mesh axis 'x'" in messages[0]
    assert "fa4_jax.parallel.local_decode" in messages[0]


AXES = {
    "a pool each": (0, 0, 0, 0, 0),
    "one pool": (0, None, None, 0, 0),
    "one table": (0, 0, 0, None, 0),
}


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("twice", [False, True])
def test_vmap_over_devices(name, twice, seed, launched):
    """Each device has the pools of its instances, and no page moves."""
    mesh, axes = make_mesh(AUTO), AXES[name]
    caches = [make_cache(CASES["row"], seed + i).arrays for i in range(4)]
    finite = [[np.where(np.isnan(x), 0, x).astype(x.dtype) for x in own[:3]] for own in caches]
    caches = [(*numbers, *own[3:]) for numbers, own in zip(finite, caches, strict=True)]
    args = [
        np.stack(each) if axis == 0 else each[0]
        for each, axis in zip(zip(*caches, strict=True), axes, strict=True)
    ]
    mapped = jax.vmap(decode, axes)
    where = [P("x") if axis == 0 else P() for axis in axes]
    if twice:
        args = [
            x.reshape(2, 2, *x.shape[1:]) if axis == 0 else x
            for x, axis in zip(args, axes, strict=True)
        ]
        mapped = jax.vmap(mapped, axes)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, where, strict=True)
    ]
    program = jax.jit(mapped).lower(*placed).compile()
    output = np.asarray(program(*placed), np.float32).reshape(4, *caches[0][0].shape)
    assert collectives(program) == set()
    assert launched[-1].batch == 4 * 2
    for i, own in enumerate(caches):
        arrays = [x if axis == 0 else y for x, y, axis in zip(own, caches[0], axes, strict=True)]
        expected = np.asarray(decode(*arrays, implementation="xla"), np.float32)
        np.testing.assert_allclose(output[i], expected, rtol=2e-2, atol=2e-3)


def test_vmap_over_sinks_and_caps(seed, launched):
    """One instance after another, on the pages that all share."""
    case = CASES["scores"]
    cache = make_cache(case, seed)
    sinks, caps = np.random.default_rng(seed).normal(size=(3, 4)), np.array([0.5, 2.0, 30.0])

    def run(sinks: Any, cap: Any) -> Any:
        return decode(*cache.arrays, sinks=sinks, logits_soft_cap=cap, return_residual=True)

    output, lse = jax.jit(jax.vmap(run))(sinks.astype(np.float32), caps.astype(np.float32))
    assert launched[-1].batch == case.batch
    for i in range(3):
        inputs = dataclasses.replace(cache.inputs, sinks=sinks[i].astype(np.float32))
        own = dataclasses.replace(case, soft_cap=float(caps[i]))
        assert_right(own, dataclasses.replace(cache, inputs=inputs), output[i], lse[i])


@pytest.mark.parametrize("devices", [1, 2])
def test_programs_for_cuda_have_launches(devices, monkeypatch):
    """On several devices they come with the partitions."""
    monkeypatch.setattr(api, "current_target", fake_target)
    jax.clear_caches()
    mesh = jax.make_mesh((devices,), ("x",), (AUTO,), devices=jax.devices()[:devices])
    cache = make_cache(CASES["row"], 0)
    where = [P("x") if x.shape[0] == 4 else P() for x in cache.arrays]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(cache.arrays, where, strict=True)
    ]
    text = jax.jit(decode).trace(*placed).lower(lowering_platforms=("cuda",)).as_text()
    found = text.count("@CustomSPMDPartitioning"), len(launched_kernels(text))
    assert found == ((1, 0) if devices > 1 else (0, 2))
    assert text.count('kernel = "') == found[1] // 2  # One call launches both.
    jax.clear_caches()
