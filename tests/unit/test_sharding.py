"""Compares attention on meshes of four devices with the float64 oracle.

The kernel path runs with the pure-JAX implementation as every device's kernel: what is tested is
which device has which part of the operands and which results are summed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax import api, attention, launches, log, runtime, xla
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, Inputs, make_inputs, oracle, ordinary
from fa4_jax.problem import Problem
from tests.fakes import fake_target

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the operands lie on a mesh of 2 x 2 devices, "x" and "y".

    Attributes:
      heads: query and KV heads.
      rows, keys: specs of query and of key and value.
      batch: spec of the lengths and offsets.
      local: batch, query heads and KV heads of one device.
      copies: number of devices that hold the same KV head and entries of the batch.
    """

    heads: tuple[int, int]
    rows: P
    keys: P
    batch: P
    local: tuple[int, int, int]
    copies: int = 1


X, XY = P("x"), P("x", None, "y")
LAYOUTS = {
    "replicated": Layout((4, 2), P(), P(), P(), (4, 4, 2)),
    "batch": Layout((4, 2), X, X, P(), (2, 4, 2)),
    "batch on both axes": Layout((4, 2), P(("x", "y")), P(("x", "y")), P(("x", "y")), (1, 4, 2)),
    "batch and heads": Layout((4, 2), XY, XY, X, (2, 2, 1)),
    "ungrouped heads": Layout((4, 4), XY, XY, X, (2, 2, 2)),
    "one KV head": Layout((4, 1), XY, X, X, (2, 2, 1), copies=2),
    "KV heads on one axis of two": Layout(
        (8, 2), P(None, None, ("x", "y")), P(None, None, "x"), P(), (4, 2, 1), copies=2
    ),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """Makes kernels for everything, on the CPU; their operands are added to the list."""
    target = dataclasses.replace(fake_target(), platforms=("cuda", "cpu"))
    problems: list[Problem] = []

    def forward(plan: Any, operands: Any) -> Any:
        problems.append(plan.problem)
        return xla.forward(plan.problem, operands)

    def backward(plan: Any, *args: Any) -> Any:
        problems.append(plan.problem)
        return xla.backward(plan.problem, *args)

    jax.clear_caches()
    monkeypatch.setattr(api, "current_target", lambda: target)
    monkeypatch.setattr(launches, "forward", forward)
    monkeypatch.setattr(launches, "backward", backward)
    yield problems
    jax.clear_caches()


def make_mesh(kind: AxisType) -> Mesh:
    kinds = (AUTO if kind is MANUAL else kind,) * 2
    return jax.make_mesh((2, 2), ("x", "y"), kinds, devices=jax.devices()[:4])


def make_case(dtype: str, heads: tuple[int, int]) -> Case:
    return Case(
        dtype=dtype,
        head_dim=8,
        batch=4,
        heads=heads,
        query_length=40,
        key_length=56,
        is_causal=True,
        query_offset=(9, 0, -3, 16),
        query_lengths=(40, 33, 0, 7),
        key_lengths=(56, 1, 30, 45),
    )


def both_ways(q: Any, k: Any, v: Any, lengths: tuple[Any, ...], bars: tuple[Any, Any]) -> Any:
    """Returns output, log-sum-exp, and the gradients of query, key and value."""
    rows, keys, offset = lengths

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return attention(
            q,
            k,
            v,
            is_causal=True,
            query_offset=offset,
            query_seq_lengths=rows,
            key_value_seq_lengths=keys,
            return_residual=True,
        )

    results, transpose = jax.vjp(run, q, k, v)
    return (*results, *transpose(bars))


def arguments(case: Case, inputs: Inputs) -> tuple[Any, ...]:
    lengths = (case.query_lengths, case.key_lengths, case.query_offset)
    bars = (inputs.output_bar, inputs.lse_bar)
    rows = tuple(np.asarray(x, np.int32) for x in lengths)
    return inputs.query, inputs.key, inputs.value, rows, bars


def specs(layout: Layout) -> tuple[Any, ...]:
    """Returns the specs of `arguments`."""
    batch, _, heads, _ = (*layout.rows, *(None,) * (4 - len(layout.rows)))
    bars = (layout.rows, P(batch, heads))
    return layout.rows, layout.keys, layout.keys, (layout.batch,) * 3, bars


def compiled(function: Callable[..., Any], mesh: Mesh, args: Any, where: Any) -> tuple[Any, Any]:
    """Returns the compiled program and its arguments, placed."""
    placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), args, where)
    return jax.jit(function).lower(*placed).compile(), placed


NUMBERS = r"= (s32\[\](?:\{\})?|\((?:s32\[\](?:\{\})?(?:, )?)+\)) all-reduce\("
"""All-reduces of single integers: the least and the greatest offset of a sharded batch."""


def collectives(program: Any, numbers: bool = True) -> set[str]:
    """Returns the names of the collectives in a program, with or without those of NUMBERS."""
    text = "\n".join(
        line for line in program.as_text().splitlines() if numbers or not re.search(NUMBERS, line)
    )
    return {name for name in COLLECTIVES if re.search(rf" {name}(-start)?\(", text)}


def assert_right(case: Case, inputs: Inputs, results: Any, copies: int = 1) -> None:
    truth = oracle(case, inputs)
    usual = [ordinary(case, inputs, shift, copies) for shift in (0.0, *REFERENCE_SHIFTS)]
    for name, result in zip(("output", "lse", "dq", "dk", "dv"), results, strict=True):
        rounded = [x[name] for x in usual]
        verdict = compare(name, case.dtype, np.asarray(result), truth[name], rounded)
        assert verdict.failure is None, f"{name}: {verdict.failure}"


def check(kind: AxisType, layout: Layout, case: Case, seed: int, numbers: bool = True) -> None:
    """Checks numbers, types and collectives; `numbers` is as in `collectives`."""
    mesh, inputs = make_mesh(kind), make_inputs(case, seed)
    where = specs(layout)
    function = both_ways
    if kind is MANUAL:
        results = (*where[4], *where[:3])
        function = jax.shard_map(both_ways, mesh=mesh, in_specs=where, out_specs=results)
    program, placed = compiled(function, mesh, arguments(case, inputs), where)
    results = program(*placed)
    assert_right(case, inputs, results, layout.copies)
    assert collectives(program, numbers) == ({"all-reduce"} if layout.copies > 1 else set())
    for result, spec in zip(results, (*where[4], *where[:3]), strict=True):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((AUTO, name) for name in ("batch and heads", "one KV head")),
        *((EXPLICIT, name) for name in LAYOUTS if name != "batch on both axes"),
        *((MANUAL, name) for name in ("batch and heads", "one KV head")),
    ],
    ids=str,
)
def test_default_path(kind, name, seed):
    # The compiler's loops run alike on all devices: over the blocks that any device's rows see.
    check(kind, LAYOUTS[name], make_case("f32", LAYOUTS[name].heads), seed, kind is not AUTO)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((AUTO, name) for name in LAYOUTS),
        *((EXPLICIT, name) for name in ("batch and heads", "KV heads on one axis of two")),
        (MANUAL, "one KV head"),
    ],
    ids=str,
)
def test_kernel_path(kind, name, seed, launched):
    layout = LAYOUTS[name]
    check(kind, layout, make_case("bf16", layout.heads), seed)
    found = {(p.batch, p.query_heads, p.kv_heads) for p in launched[-2:]}
    assert found == {layout.local}


def assert_sharded_right(kind: AxisType, case: Case, seed: int, where: Any) -> Any:
    mesh, inputs = make_mesh(kind), make_inputs(case, seed)
    program, placed = compiled(both_ways, mesh, arguments(case, inputs), where)
    assert_right(case, inputs, program(*placed))
    return program


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
def test_replicated_keys_of_sharded_queries(kind, seed, launched):
    where = (XY, P(), P(), (P(),) * 3, (XY, P("x", "y")))
    assert_sharded_right(kind, make_case("bf16", (4, 2)), seed, where)
    assert {(p.batch, p.query_heads, p.kv_heads) for p in launched[-2:]} == {(2, 2, 1)}


def test_auto_gathers_lengths_and_head_dim_and_tells_of_lengths(seed, launched, caplog):
    log.warn_once.cache_clear()
    rows = P("x", "y")
    where = (rows, P("x", None, None, "y"), P("x", "y"), (X,) * 3, (rows, P("x", None, "y")))
    program = assert_sharded_right(AUTO, make_case("bf16", (4, 2)), seed, where)
    assert {(p.batch, p.query_heads, p.kv_heads) for p in launched[-2:]} == {(2, 4, 2)}
    assert "all-gather" in collectives(program)
    messages = [record.getMessage() for record in caplog.records if record.name == "fa4_jax"]
    assert len(messages) == 2  # of query and value, not again in the backward
    assert "is sharded along its length, over mesh axis 'y'" in messages[0]
    assert "fa4_jax.parallel.attention" in messages[0]


def test_auto_where_a_mesh_axis_covers_heads_and_features(seed, launched):
    mesh = jax.make_mesh((4,), ("x",), (AUTO,), devices=jax.devices()[:4])
    case = make_case("bf16", (4, 2))
    inputs = make_inputs(case, seed)
    q, k, v, lengths, bars = arguments(case, inputs)

    def flat(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> Any:
        q, k, v = (x.reshape(*x.shape[:2], -1, 8) for x in (q, k, v))
        return both_ways(q, k, v, *rest)

    features = P(None, None, "x")  # two heads in four parts
    args = (*(x.reshape(*x.shape[:2], -1) for x in (q, k, v)), lengths, bars)
    where = (features, features, features, (P(),) * 3, (P(), P()))
    program, placed = compiled(flat, mesh, args, where)
    assert_right(case, inputs, program(*placed), copies=2)
    assert {(p.batch, p.query_heads, p.kv_heads) for p in launched[-2:]} == {(4, 1, 1)}


@pytest.mark.parametrize("manual", ["x", "y"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_auto_axis_inside_a_shard_map_over_the_other(manual, kv_heads, seed, launched):
    auto = "y" if manual == "x" else "x"
    mesh, case = make_mesh(AUTO), make_case("bf16", (4, kv_heads))
    inputs = make_inputs(case, seed)
    rows, batch = P(manual, None, auto), P(manual)
    keys = rows if kv_heads == 2 else batch
    where = (rows, keys, keys, (batch,) * 3, (rows, P(manual, auto)))
    body = jax.shard_map(
        both_ways,
        mesh=mesh,
        in_specs=jax.tree.map(lambda _: batch, where),
        out_specs=batch,
        axis_names={manual},
    )
    program, placed = compiled(body, mesh, arguments(case, inputs), where)
    assert_right(case, inputs, program(*placed))
    # JAX has no sum over a part of the devices: query heads with no KV head are gathered.
    local = (2, 2, 1) if kv_heads == 2 else (2, 4, 1)
    assert {(p.batch, p.query_heads, p.kv_heads) for p in launched[-2:]} == {local}


def test_one_axis_explicit_and_one_auto(seed, launched):
    mesh = jax.make_mesh((2, 2), ("x", "y"), (EXPLICIT, AUTO), devices=jax.devices()[:4])
    case = make_case("bf16", (4, 2))
    inputs = make_inputs(case, seed)
    where = (XY, XY, XY, (X,) * 3, (XY, P("x", "y")))
    with jax.set_mesh(mesh):
        program, placed = compiled(both_ways, mesh, arguments(case, inputs), where)
        assert_right(case, inputs, program(*placed))
    assert {(p.batch, p.query_heads, p.kv_heads) for p in launched[-2:]} == {(2, 2, 1)}


def explicit(shape: tuple[int, ...], spec: P) -> jax.Array:
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(make_mesh(EXPLICIT), spec))


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (P(None, "x"), P(), "query is sharded along its length, over mesh axis 'x'"),
        (P(), P(None, ("x", "y")), "key is sharded along its length, over mesh axis 'x' and 'y'"),
        (P(), P(None, None, None, "y"), "key is sharded along its head_dim, over mesh axis 'y'"),
        (P("x"), P("y"), r"query is sharded along its batch over mesh axes \('x',\), but key"),
        (P(None, None, "x"), P(None, None, "y"), r"along its heads .* \('x',\), but key over"),
    ],
)
def test_explicit_shardings_that_do_not_fit(rows, keys, message):
    q, k = explicit((4, 8, 4, 8), rows), explicit((4, 8, 4, 8), keys)
    for run in (attention, jax.jit(attention)):
        with pytest.raises(ValueError, match=message):
            run(q, k, k)


def test_explicit_heads_that_split_groups():
    q, k = explicit((4, 8, 6, 8), P(None, None, "x")), explicit((4, 8, 3, 8), P())
    with pytest.raises(ValueError, match="a device's 3 would be parts of several groups of 2"):
        attention(q, k, k)


def test_explicit_bias_and_mask(rng):
    shapes = ((4, 8, 4, 8), (4, 12, 2, 8), (4, 12, 2, 8), (1, 4, 8, 12), (4, 8, 12))
    args = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    where = [XY, XY, XY, P(None, "y"), P("y")]

    def run(q: Any, k: Any, v: Any, bias: Any, other: Any) -> Any:
        gradient = jax.grad(lambda *x: (attention(*x) ** 2).sum(), (0, 1, 2, 3))
        return (gradient(q, k, v, bias), attention(q, k, v, other, other > 0))

    program, placed = compiled(run, make_mesh(EXPLICIT), args, where)
    actual, expected = program(*placed), jax.jit(run)(*args)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6 * (1 + np.abs(y).max()))
    assert actual[0][3].sharding.spec[1] == "y"


def test_explicit_traced_scale(rng):
    args = [rng.normal(size=(4, n, 4, 8)).astype(np.float32) for n in (16, 24)]

    def run(q: jax.Array, k: jax.Array, scale: jax.Array) -> Any:
        return jax.grad(lambda scale: (attention(q, k, k, scale=scale) ** 2).sum())(scale)

    program, placed = compiled(run, make_mesh(EXPLICIT), (*args, np.float32(0.4)), (XY, XY, P()))
    np.testing.assert_allclose(program(*placed), jax.jit(run)(*args, 0.4), rtol=1e-4)


def test_explicit_without_a_batch_axis_without_jit_and_empty(rng):
    q, k = (rng.normal(size=(n, 4, 8)).astype(np.float32) for n in (6, 9))
    mesh = make_mesh(EXPLICIT)
    where = NamedSharding(mesh, P(None, "y"))
    placed, keys = jax.device_put(q, where), jax.device_put(k, where)
    output, lse = attention(placed, keys, keys, return_residual=True)
    np.testing.assert_allclose(output, attention(q, k, k), rtol=1e-5, atol=1e-6)
    assert output.sharding.is_equivalent_to(where, 3)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 2)
    with jax.set_mesh(mesh):
        empty = attention(placed, keys[:0], keys[:0])
    assert not empty.any() and empty.sharding.is_equivalent_to(where, 3)


def squares(q: jax.Array, k: jax.Array) -> Any:
    return (attention(q, k, k).astype(jnp.float32) ** 2).sum()


def test_explicit_vmap(rng, launched):
    args = [jnp.asarray(rng.normal(size=(3, 4, n, 4, 8)), jnp.bfloat16) for n in (16, 24)]
    batched = jax.vmap(jax.grad(squares, (0, 1)))
    program, placed = compiled(batched, make_mesh(EXPLICIT), args, [P(None, *XY)] * 2)
    for x, y in zip(program(*placed), jax.jit(batched)(*args), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not collectives(program)


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        (P("x"), (0, 0)),
        (P("x", None, None, "y"), (0, None)),
        (P("x", "y"), (0, 0)),
        (P(("x", "y")), (0, None)),
    ],
    ids=str,
)
def test_explicit_vmap_over_a_sharded_axis(spec, axes, rng, launched):
    """Each device computes the instances that it has, as a batch."""
    args = [jnp.asarray(rng.normal(size=(4, 2, n, 4, 8)), jnp.bfloat16) for n in (16, 24)]
    args = [x if axis == 0 else x[0] for x, axis in zip(args, axes, strict=True)]
    inner = [entry if entry == "y" else None for entry in spec[1:]]
    where = [spec if axis == 0 else P(*inner) for axis in axes]
    batched = jax.vmap(lambda q, k: attention(q, k, k, return_residual=True), axes)
    program, placed = compiled(batched, make_mesh(EXPLICIT), args, where)
    local = launched[-1]
    assert_close(program(*placed), jax.jit(batched)(*args))
    # JAX 0.10's vmap of a shard_map over the other axes gathers the mapped one (docs: limits).
    assert collectives(program) <= (set() if spec[0] == ("x", "y") else {"all-gather"})
    assert program(*placed)[0].sharding.spec[0] == spec[0]
    shards = 4 if spec[0] == ("x", "y") else 2
    assert local.batch * local.query_heads == 4 * 2 * 4 // shards // (2 if "y" in spec else 1)
    if jax.__version_info__ < (0, 9):
        return  # its transpose of a shard_map under such a vmap is wrong (docs: limits)
    gradient = jax.vmap(jax.grad(squares, (0, 1)), axes)
    program, placed = compiled(gradient, make_mesh(EXPLICIT), args, where)
    assert_close(program(*placed), jax.jit(gradient)(*args))


def assert_close(found: Any, expected: Any) -> None:
    """Checks equality up to the order of sums, which depends on the sizes of blocks."""
    for x, y in zip(found, expected, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=2**-7, atol=2**-7 * np.abs(y).max())


def test_programs_for_cuda(kernels_present, rng):
    q = rng.normal(size=(4, 128, 4, 64)).astype(jnp.bfloat16)

    def program(devices: int, kind: AxisType) -> str:
        mesh = jax.make_mesh((devices,), ("x",), (kind,), devices=jax.devices()[:devices])
        x = jax.device_put(q, NamedSharding(mesh, X))
        gradient = jax.grad(lambda x: attention(x, x, x).astype(jnp.float32).sum())
        return jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()

    local, opaque = 'kernel = "', "@CustomSPMDPartitioning"
    auto, single, typed = program(2, AUTO), program(1, AUTO), program(2, EXPLICIT)
    assert (auto.count(opaque), auto.count(local)) == (2, 0)  # launches come with the partitions
    assert (single.count(opaque), single.count(local)) == (0, 4)
    assert (typed.count(opaque), typed.count(local)) == (0, 4)
    launches = [line for line in typed.splitlines() if local in line]
    assert all("tensor<2x128x4x64xbf16>" in line for line in launches)


@pytest.fixture
def launchable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets programs with launches compile: the library's CPU handler exists, without a driver."""
    library, reason = runtime._open_library()
    if library is None:
        pytest.skip(reason)
    on_host = jax.ffi.pycapsule(library.fa4_jax_execute_on_host)
    jax.ffi.register_ffi_target(runtime.TARGET, on_host, platform="cpu")
    target = dataclasses.replace(fake_target(), platforms=("cuda", "cpu"))
    jax.clear_caches()
    monkeypatch.setattr(api, "current_target", lambda: target)
    yield
    jax.clear_caches()


def launch_types(program: Any) -> list[str]:
    """Returns the result types of the launches."""
    return re.findall(r"= (.*) custom-call\(.*fa4_jax_launch", program.as_text())


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
def test_partitioned_launches(kind, launchable):
    layout, case = LAYOUTS["one KV head"], make_case("bf16", (4, 1))
    args = arguments(case, make_inputs(case, 0))
    program, _ = compiled(both_ways, make_mesh(kind), args, specs(layout))
    found = launch_types(program)
    assert len(found) == 4
    # The backward splits the group of two query heads.
    assert "bf16[2,40,2,8]" in found[0] and "bf16[2,56,2,8]" in found[2]
    assert collectives(program) == {"all-reduce"}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
def test_remat_with_the_policy_does_not_rerun_the_partitioned_kernel(kind, kernels_present):
    q = jax.device_put(np.ones((4, 16, 4, 8), jnp.bfloat16), NamedSharding(make_mesh(kind), XY))

    def count(policy: Any) -> int:
        layer = jax.checkpoint(lambda q, k: squares(jnp.sin(q), jnp.sin(k)), policy=policy)
        step = jax.jit(jax.value_and_grad(layer, (0, 1))).trace(q, q)
        program = step.lower(lowering_platforms=("cuda",)).as_text()
        return program.count("@CustomSPMDPartitioning") + program.count('kernel = "')

    once = 2 if kind is AUTO else 4  # Auto: one partitioned operation each
    assert count(None) == once + 1
    assert count(fa4_jax.save_attention_policy) == once
