"""Tests the kernel path as far as a machine without a GPU can: lowering for CUDA, and refusals."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax import api, attention, catalogue, log
from fa4_jax.key import Pass
from tests.fakes import fake_target
from tests.programs import launched_kernels

pytestmark = pytest.mark.usefixtures("kernels_present")

FORWARD = "sm_90a_fwd_bf16_d128_band"
BACKWARD = ["sm_90a_bwd_pre_bf16_d128", "sm_90a_bwd_bf16_d128_band", "sm_90a_bwd_post_bf16_d128"]


@pytest.fixture
def operands(rng: np.random.Generator) -> list[jax.Array]:
    shapes = ((2, 36, 4, 120), (2, 52, 2, 120), (2, 52, 2, 120))
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def program(function: Callable[..., Any], *args: Any) -> str:
    """Returns StableHLO for CUDA."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def launches(function: Callable[..., Any], *args: Any) -> list[str]:
    """Returns the kernels of the program, in order."""
    return launched_kernels(program(function, *args))


def causal(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
    return attention(q, k, v, is_causal=True, return_residual=True, **options)


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: jax.Array) -> Any:
        return sum((x.astype(jnp.float32) ** 2).sum() for x in function(*args))

    return jax.grad(loss, (0, 1, 2))


def test_one_launch_forward_and_three_backward(operands):
    assert launches(causal, *operands) == [FORWARD]
    assert launches(gradient(causal), *operands) == [FORWARD, *BACKWARD]


def test_attributes(operands):
    def attributes(**options: Any) -> dict[str, float]:
        text = program(lambda *x: attention(*x, **options), *operands)
        found = re.findall(r"(scale_log2|window_\w+|rescale\w+) = (\S+) : [if]32", text)
        return {name: float(value) for name, value in found}

    assert attributes(scale=0.5, local_window_size=(7, None)) == {
        "scale_log2": pytest.approx(0.5 * np.log2(np.e)),
        "rescale_threshold_log2": 8.0,
        "window_left": 7,
        "window_right": 2**30,
    }
    assert attributes(numerics="exact", is_causal=True) == {
        "scale_log2": pytest.approx(120**-0.5 * np.log2(np.e)),
        "rescale_threshold_log2": 0.0,
        "window_left": 2**30,
        "window_right": 0,
    }


def test_results_alias_operands_of_their_name(operands):
    text = program(gradient(lambda *x: causal(*x, deterministic=True)), *operands)
    main = next(line for line in text.splitlines() if "bwd_bf16_d128_band_deterministic" in line)
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", main)
    assert aliases == [("2", "7"), ("3", "8"), ("4", "9")]  # dq_acc, dq_order, dq_ticket


def test_only_a_dense_backward_has_room_for_split_tiles(operands):
    def tails(**options: Any) -> list[str]:
        text = program(gradient(lambda *x: attention(*x, **options)), *operands)
        before = next(line for line in text.splitlines() if "bwd_pre_bf16_d128" in line)
        return re.findall(r"tensor<(\d+x\d+x0)xi32>", before)

    assert tails() == ["4x4x0"]
    assert tails(is_causal=True) == ["0x0x0"]
    assert tails(deterministic=True) == []


def test_remat_with_the_policy_does_not_rerun_the_kernel(operands):
    def layer(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return causal(jnp.sin(q), jnp.sin(k), jnp.sin(v))

    def count(policy: Any) -> int:
        return launches(gradient(jax.checkpoint(layer, policy=policy)), *operands).count(FORWARD)

    assert count(None) == 2  # this is what the policy is for
    assert count(fa4_jax.save_attention_policy) == 1


def test_remat_in_a_scan_over_layers_does_not_rerun_the_kernel(operands):
    _, k, v = operands

    @jax.checkpoint
    def plain(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return attention(jnp.sin(x), k, v, is_causal=True), None

    saving = jax.checkpoint(
        lambda x, _: (attention(jnp.sin(x), k, v, is_causal=True), None),
        policy=fa4_jax.save_attention_policy,
    )

    def count(layer: Any) -> int:
        def loss(q: jax.Array) -> jax.Array:
            return jax.lax.scan(layer, q, None, length=3)[0].astype(jnp.float32).sum()

        return launches(jax.grad(loss), operands[0]).count(FORWARD)

    assert count(plain) == 2
    assert count(saving) == 1


def test_batched_queries_of_the_same_keys_are_one_launch_without_a_copy(operands):
    q, k, v = operands
    batched = jax.vmap(causal, (0, None, None))
    assert launches(batched, jnp.stack([q] * 3), k, v) == [FORWARD]
    call = next(x for x in program(batched, jnp.stack([q] * 3), k, v).splitlines() if FORWARD in x)
    assert "tensor<2x36x12x120xbf16>, tensor<2x52x2x120xbf16>" in call


def test_a_batch_of_everything_is_folded(operands):
    stacked = [jnp.stack([x] * 3) for x in operands]
    text = program(jax.vmap(gradient(causal)), *stacked)
    assert text.count("tensor<6x36x4x120xbf16>, tensor<6x52x2x120xbf16>") >= 2
    assert launches(jax.vmap(gradient(causal)), *stacked) == [FORWARD, *BACKWARD]


@pytest.mark.parametrize("batched", [(0, None, None), (None, 0, 0), (None, 0, None)])
def test_an_unbatched_operand_is_never_as_large_as_a_batch(operands, batched):
    size = 5
    args = [
        x if axis is None else jnp.stack([x] * size)
        for x, axis in zip(operands, batched, strict=True)
    ]
    text = program(jax.vmap(gradient(causal), batched), *args)
    calls = [line for line in text.splitlines() if "kernel = " in line]
    assert len(calls) == 4
    for x, axis in zip(operands, batched, strict=True):
        if axis is None and x is not operands[0]:
            copied = "x".join(map(str, (size * x.shape[0], *x.shape[1:])))
            assert all(f"tensor<{copied}xbf16>" not in line for line in calls)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, 0)], ids=str)
def test_vmap_over_an_axis_of_size_zero_launches_nothing(operands, mapped):
    args = [x if axis is None else x[None][:0] for x, axis in zip(operands, mapped, strict=True)]
    assert launches(jax.vmap(gradient(causal), mapped), *args) == []


def test_empty_calls_launch_nothing_and_have_values_head_dim(operands):
    q, k, v = operands
    for b, s in ((0, 52), (2, 0)):
        args = q[:b], k[:b, :s], v[:b, :s, :, :64]
        run = lambda *x: causal(*x, implementation="kernel")  # noqa: E731
        assert run(*args)[0].shape == (b, 36, 4, 64)
        assert launches(gradient(run), *args) == []


def test_an_offset_is_no_part_of_the_program(operands):
    q, k, v = operands

    def text(offset: int) -> str:
        return program(gradient(lambda *x: causal(*x, query_offset=offset)), *operands)

    found = [api.canonicalise(api.Call(q, k, v, is_causal=True, query_offset=x)) for x in (3, 4)]
    assert found[0][1] == found[1][1]
    assert re.sub("dense<.*>", "", text(3)) == re.sub("dense<.*>", "", text(4)) != text(4)


def test_kernel_on_another_platform_says_so(operands):
    for run in (causal, jax.jit(causal, static_argnames="implementation")):
        with pytest.raises(NotImplementedError, match="the kernels run on cuda"):
            run(*operands, implementation="kernel")


def test_by_default_the_platform_decides(operands):
    output, lse = jax.jit(causal)(*operands)  # lowered for CPU: the default path
    expected, expected_lse = causal(*operands, implementation="xla")
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(lse, expected_lse)


def test_an_exported_program_holds_both_paths(operands):
    exported = jax.export.export(
        jax.jit(causal),
        platforms=("cuda", "cpu"),
        disabled_checks=fa4_jax.export_checks(),
    )(*operands)
    assert "fa4_jax_launch" in exported.mlir_module()
    output, _ = jax.export.deserialize(exported.serialize()).call(*operands)
    np.testing.assert_array_equal(output, causal(*operands)[0])


def test_a_missing_backward_is_an_error_where_kernels_are_insisted_on(operands, monkeypatch):
    keys = tuple(k for k in catalogue.all_keys() if k.kernel is Pass.FORWARD)
    monkeypatch.setattr(api, "current_target", lambda: fake_target(keys))
    insist = lambda *x: causal(*x, implementation="kernel")  # noqa: E731
    assert launches(insist, *operands) == [FORWARD]
    with pytest.raises(NotImplementedError, match="backward: no kernel sm_90a_bwd_pre"):
        launches(gradient(insist), *operands)
    assert launches(gradient(causal), *operands) == [
        FORWARD
    ]  # otherwise it is the default's backward


def test_a_missing_backward_is_told_once(operands, monkeypatch, caplog):
    keys = tuple(k for k in catalogue.all_keys() if k.kernel is Pass.FORWARD)
    monkeypatch.setattr(api, "current_target", lambda: fake_target(keys))
    log.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fa4_jax"):
        for _ in range(2):
            program(gradient(causal), *operands)
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith(
        "attention uses the default path for its backward: no kernel sm_90a_bwd"
    )


def test_gradients_under_shard_map_have_the_types_that_it_checks(operands):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    queries = (P(None, "x"), P(), P())  # sharded queries of replicated keys
    reduced = jax.shard_map(gradient(causal), mesh=mesh, in_specs=queries, out_specs=queries)
    text = program(reduced, *operands)
    assert text.count("all_reduce") == 2  # of dK and dV
    assert len(launches(reduced, *operands)) == 4
    batch = (P("x"),) * 3
    local = jax.shard_map(gradient(causal), mesh=mesh, in_specs=batch, out_specs=batch)
    assert "all_reduce" not in program(local, *operands)
    # In bfloat16 a sum that cancels may be 5 % off where it is compiled in another way.
    operands = [x.astype(jnp.float32) for x in operands]
    pairs = zip(jax.jit(local)(*operands), gradient(causal)(*operands), strict=True)
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
