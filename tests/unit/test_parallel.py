"""Compares context parallelism on eight virtual devices with the float64 oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import api, launches, parallel, xla
from fa4_jax.bands import UNBOUNDED
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.plan import Plan
from tests import dense_kernels
from tests.fakes import fake_target
from tests.parallel_cases import (
    Layout,
    compiled,
    failures,
    make_layout,
    make_mesh,
    masks,
    options_of,
    received_bytes,
    schemes,
)

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual
SCHEMES = [*schemes("seq"), *schemes("ring", "ulysses")]
MASKS = masks(48, dtype="f32", head_dim=8, heads=(8, 2))
GROUPS = ((8, 2), (4, 4), (8, 1))
CASES = [dataclasses.replace(case, heads=heads) for heads in GROUPS for case in MASKS.values()]
EVERYTHING = (UNBOUNDED, UNBOUNDED)


def name_of(x: Any) -> str | None:
    return f"{type(x).__name__}-{x.layout}" if hasattr(x, "layout") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Sets `some_case`: one of CASES by the seed, or with --every-case each of them."""
    if "some_case" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-case")
        numbers = range(len(CASES)) if every else [None]
        metafunc.parametrize(
            "some_case", numbers, ids=lambda i: "any" if i is None else CASES[i].id
        )


every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)


@pytest.fixture(scope="module")
def dense() -> Iterator[None]:
    """Uses few dense lines for both implementations, and kernels for everything, on the CPU."""
    target = dataclasses.replace(fake_target(), platforms=("cuda", "cpu"))
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "current_target", lambda: target)
        for name in ("forward", "backward"):
            stand_in = getattr(dense_kernels, name)
            patch.setattr(xla, name, stand_in)
            patch.setattr(launches, name, on_kernels(stand_in))
        yield
    jax.clear_caches()


def on_kernels(stand_in: Any) -> Any:
    """The stand-in for launches, which are fixed for a band or for none."""

    def launch(plan: Plan, *args: Any) -> Any:
        band = plan.forward[0].key.band
        problem = plan.problem if band else dataclasses.replace(plan.problem, window=EVERYTHING)
        return stand_in(problem, *args)

    return launch


def sequence_mesh(kind: AxisType, scheme: Any, devices: int, **others: int) -> Mesh:
    """Makes a mesh for a scheme with four or two devices for the sequences, and other axes."""
    if isinstance(scheme, parallel.RingUlysses):
        return make_mesh(kind, **others, ring=2, ulysses=devices // 2)
    return make_mesh(kind, **others, seq=devices)


def check(
    kind: AxisType,
    scheme: parallel.Scheme,
    layout: Layout,
    case: Case,
    seed: int,
    implementation: Any = None,
) -> Any:
    inputs = make_inputs(case, seed)
    program, placed = compiled(case, inputs, scheme, layout, kind, implementation)
    results = program(*placed)
    assert not failures(case, inputs, layout, results)
    q, k, v, output, lse, _ = layout.specs
    for result, spec in zip(results, (output, lse, q, k, v), strict=True):
        if kind is EXPLICIT or kind is MANUAL:
            assert result.sharding.is_equivalent_to(NamedSharding(layout.mesh, spec), result.ndim)
    return program


@pytest.mark.parametrize("mask", MASKS)
@every_scheme
def test_inside_shard_map(scheme, mask, seed, dense):
    layout = make_layout(sequence_mesh(MANUAL, scheme, 4), scheme)
    check(MANUAL, scheme, layout, MASKS[mask], seed)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT, MANUAL], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (8, 16)])
@pytest.mark.parametrize("scheme", SCHEMES[1:6:2], ids=name_of)
def test_values_of_another_head_dim(scheme, head_dim, value_dim, kind, seed, dense):
    case = dataclasses.replace(MASKS["causal"], head_dim=head_dim, value_dim=value_dim)
    check(kind, scheme, make_layout(sequence_mesh(kind, scheme, 4), scheme), case, seed)


@pytest.mark.parametrize(("heads", "dtype"), [((4, 4), "f32"), ((8, 1), "bf16")], ids=str)
@every_scheme
def test_heads(scheme, heads, dtype, seed, dense):
    case = dataclasses.replace(MASKS["causal"], heads=heads, dtype=dtype)
    layout = make_layout(sequence_mesh(MANUAL, scheme, 4), scheme)
    check(MANUAL, scheme, layout, case, seed)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT, MANUAL], ids=str)
@every_scheme
def test_beside_data_and_tensor_axes(scheme, kind, some_case, seed, dense):
    case = CASES[seed % len(CASES) if some_case is None else some_case]
    axes = {"tensor": 2} if isinstance(scheme, parallel.RingUlysses) else {"data": 2, "tensor": 2}
    devices = 8 // (2 * len(axes))
    mesh = sequence_mesh(kind, scheme, devices, **axes)
    batch = "data" if "data" in axes else None
    shared_out = "tensor" if case.heads[1] > 1 else None
    layout = make_layout(mesh, scheme, batch, "tensor", shared_out)
    check(kind, scheme, layout, case, seed)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT, MANUAL], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES[1:5:2], ids=name_of)
def test_keys_that_tensor_devices_share(scheme, kind, seed, dense):
    case = dataclasses.replace(MASKS["causal"], heads=(8, 1))
    layout = make_layout(make_mesh(kind, seq=2, tensor=2), scheme, None, "tensor", None)
    program = check(kind, scheme, layout, case, seed)
    assert "all-reduce" in received_bytes(program)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES[::2], ids=name_of)
def test_lengths_that_devices_do_not_divide(scheme, kind, seed, dense):
    case = dataclasses.replace(MASKS["causal"], query_length=45, key_length=50, query_offset=5)
    mesh = sequence_mesh(AUTO, scheme, 4)
    inputs = make_inputs(case, seed)
    layout = make_layout(mesh, scheme)
    q, k, v = inputs.query, inputs.key, inputs.value

    def attend(*x: jax.Array) -> Any:
        return parallel.attention(
            *x,
            scheme=scheme,
            mesh=sequence_mesh(kind, scheme, 4),
            specs=P(None, scheme.axes),
            is_causal=True,
            query_offset=5,
            return_residual=True,
        )

    @jax.jit
    def both(q: Any, k: Any, v: Any, bars: Any) -> Any:
        results, transpose = jax.vjp(attend, q, k, v)
        return *results, *transpose(bars)

    results = both(q, k, v, (inputs.output_bar, inputs.lse_bar))
    assert not failures(case, inputs, layout, results)


@pytest.mark.parametrize(
    ("scheme", "mask"),
    [
        (parallel.Ring("seq", "zigzag"), "causal with lengths"),
        (parallel.Ring("seq"), "offsets with a window"),
        (parallel.AllGather("seq"), "causal window"),
        (parallel.Ulysses("seq"), "chunked prefill"),
    ],
    ids=lambda x: name_of(x) or str(x),
)
def test_default_implementation(scheme, mask, seed):
    layout = make_layout(make_mesh(MANUAL, seq=2), scheme)
    check(MANUAL, scheme, layout, MASKS[mask], seed, "xla")


def test_eight_devices(seed, dense):
    scheme = parallel.Ring("seq", "zigzag")
    check(MANUAL, scheme, make_layout(make_mesh(MANUAL, seq=8), scheme), MASKS["causal"], seed)


BLOCK = 2 * 2 * 12 * 2 * 8 * 4
"""The bytes of a K and a V shard of the cases below: batch 2, 12 keys, 2 heads of 8 float32."""

ROWS = 2 * 12 * 8 * 8 * 4
"""The bytes of a shard of query or output: 8 heads."""

LSE = 2 * 12 * 8 * 4


def permuted(count: int) -> dict[str, int]:
    return {"collective-permute": count}


HEADS = 2 * ROWS + LSE
"""The bytes of a shard of query, output and log-sum-exp."""


@pytest.mark.parametrize(
    ("scheme", "mask", "forward", "backward"),
    [
        # Every device receives the other three shards, then again, and sends their gradients.
        (parallel.Ring("seq"), "dense", permuted(12 * BLOCK), permuted(24 * BLOCK)),
        (parallel.Ring("seq", "zigzag"), "causal", permuted(12 * BLOCK), permuted(24 * BLOCK)),
        # Shards travel up only.
        (parallel.Ring("seq"), "causal", permuted(6 * BLOCK), permuted(12 * BLOCK)),
        # Shards travel to the neighbours on both sides, or to the next.
        (parallel.Ring("seq"), "window", permuted(6 * BLOCK), permuted(12 * BLOCK)),
        (parallel.Ring("seq"), "causal window", permuted(3 * BLOCK), permuted(6 * BLOCK)),
        (parallel.AllGather("seq"), "causal window", permuted(3 * BLOCK), permuted(6 * BLOCK)),
        (parallel.Ring("seq"), "nothing seen", {}, {}),
        (
            parallel.AllGather("seq", "zigzag"),
            "causal",
            {"all-gather": 12 * BLOCK},
            {"all-gather": 12 * BLOCK, "all-to-all": 12 * BLOCK},
        ),
        # Devices exchange three quarters of Q, O, log-sum-exp, K and V, of which each KV head is
        # needed by two devices; their gradients return.
        (
            parallel.Ulysses("seq"),
            "causal",
            {"all-to-all": 3 * (HEADS + 2 * BLOCK)},
            {"all-to-all": 3 * (HEADS + 2 * BLOCK)},
        ),
        (
            parallel.RingUlysses("ring", "ulysses"),
            "causal",
            {"all-to-all": 2 * (HEADS + BLOCK), **permuted(2 * BLOCK)},
            {"all-to-all": 2 * (HEADS + BLOCK), **permuted(4 * BLOCK)},
        ),
    ],
    ids=lambda x: name_of(x) or (x if isinstance(x, str) else ""),
)
def test_collectives(scheme, mask, forward, backward, seed, dense):
    """The forward and the backward are programs of their own: a CPU's compiler, unlike a GPU's,
    merges the backward's transfers with the forward's where it sees both.
    """
    case = MASKS[mask]
    inputs = make_inputs(case, seed)
    mesh = sequence_mesh(AUTO, scheme, 4)
    rows, _, _, _, lse, _ = make_layout(mesh, scheme).specs
    place = (NamedSharding(mesh, rows),) * 3

    def attend(*x: jax.Array) -> Any:
        return parallel.attention(
            *x, scheme=scheme, mesh=mesh, specs=rows, return_residual=True, **options_of(case)
        )

    arrays = jax.device_put((inputs.query, inputs.key, inputs.value), place)
    first = jax.jit(lambda *x: jax.vjp(attend, *x)).lower(*arrays).compile()
    results, transpose = first(*arrays)
    bars = jax.device_put(results, tuple(NamedSharding(mesh, spec) for spec in (rows, lse)))
    second = jax.jit(lambda f, bars: f(bars)).lower(transpose, bars).compile()
    assert received_bytes(first) == forward
    assert received_bytes(second) == backward
