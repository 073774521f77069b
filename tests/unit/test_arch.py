"""Tests programs for a GPU that this machine lacks: with a named architecture, and without."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax import (
    api,
    attention,
    catalogue,
    explain,
    log,
    parallel,
    runtime,
    supports,
    target,
)
from fa4_jax.plan import Target
from tests.fakes import TILE, fake_manifest
from tests.programs import launched_kernels as launches

Q = jax.ShapeDtypeStruct((2, 128, 4, 128), jnp.bfloat16)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretends that every kernel of the key list is installed, and that there is no GPU."""
    manifest = fake_manifest()
    none = Target(None, manifest, "JAX sees no GPU")
    monkeypatch.setattr(runtime, "manifest", lambda: manifest)
    for module in (api, target):
        monkeypatch.setattr(module, "current_target", lambda: none)
    log.warn_once.cache_clear()
    yield
    jax.clear_caches()


def program(
    function: Callable[..., Any], *args: Any, platforms: tuple[str, ...] = ("cuda",)
) -> str:
    """Returns the program's StableHLO."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=platforms).as_text()


def gradient(**options: Any) -> Callable[..., Any]:
    return jax.grad(lambda q: attention(q, q, q, is_causal=True, **options).astype(float).sum())


@pytest.mark.parametrize("arch", catalogue.ARCHITECTURES)
def test_a_named_architecture_has_its_kernels_in_the_program(arch: str):
    found = launches(program(gradient(arch=arch), Q))
    assert [name.split("_bf16")[0] for name in found] == [
        f"{arch}_{kernel}" for kernel in ("fwd", "bwd_pre", "bwd", "bwd_post")
    ]
    told_of = explain(Q, Q, Q, is_causal=True, arch=arch)
    assert list(told_of.forward + told_of.backward) == found
    assert set(told_of.tiles) == {*found, *told_of.tangent, *told_of.hessian}
    assert told_of.tiles[found[0]] == {"m": TILE}
    assert explain(Q, Q, Q).forward == ()


def test_the_architecture_is_no_context_that_a_cache_could_miss():
    run = jax.jit(lambda q, arch: attention(q, q, q, arch=arch), static_argnames="arch")
    texts = [
        run.trace(Q, arch).lower(lowering_platforms=("cuda",)).as_text()
        for arch in (None, "sm_90a", "sm_100f", None)
    ]
    assert [[x[:6] for x in launches(text)] for text in texts] == [
        [],
        ["sm_90a"],
        ["sm_100"],
        [],
    ]


def test_kernels_of_another_machine_do_not_run_here():
    q = jnp.ones(Q.shape, Q.dtype)
    expected = attention(q, q, q, implementation="xla")
    np.testing.assert_array_equal(attention(q, q, q, arch="sm_90a"), expected)
    with pytest.raises(NotImplementedError, match="the kernels run on cuda"):
        attention(q, q, q, arch="sm_90a", implementation="kernel")


def test_an_export_for_another_machine_holds_both_paths():
    q = jnp.ones(Q.shape, Q.dtype)
    exported = jax.export.export(
        jax.jit(gradient(arch="sm_90a")),
        platforms=("cuda", "cpu"),
        disabled_checks=fa4_jax.export_checks(),
    )(q)
    exported = jax.export.deserialize(exported.serialize())
    assert len(launches(exported.mlir_module())) == 4
    np.testing.assert_array_equal(exported.call(q), jax.jit(gradient())(q))


def test_context_parallelism_for_another_machine():
    mesh = jax.make_mesh((2,), ("seq",), (AxisType.Auto,), devices=jax.devices()[:2])
    scheme = parallel.AllGather("seq")

    def run(q: jax.Array, **options: Any) -> Any:
        options |= {"scheme": scheme, "mesh": mesh, "specs": P(None, "seq")}
        return parallel.attention(q, q, q, is_causal=True, **options)

    q = jnp.ones(Q.shape, Q.dtype)
    assert launches(program(lambda q: run(q, arch="sm_100f"), q))[0].startswith("sm_100f_fwd")
    assert not launches(program(run, q))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fa4_jax"]


def test_a_program_for_cuda_without_kernels_is_told_of_once(caplog):
    with caplog.at_level(logging.WARNING, "fa4_jax"):
        program(gradient(), Q, platforms=("cpu",))
        jax.jit(gradient())(jnp.ones(Q.shape, Q.dtype))
        program(gradient(arch="sm_90a"), Q)
        program(gradient(implementation="xla"), Q)
        assert not messages(caplog)
        for _ in range(3):
            program(gradient(), Q)
        program(gradient(), Q, platforms=("cpu", "cuda"))
        (message,) = messages(caplog)
        assert message.startswith("attention uses the default path for its forward and backward: ")
        assert "arch= names the GPU" in message
        bias = jnp.zeros((1, 1, 128, 1), jnp.bfloat16)
        program(lambda q: attention(q, q, q, bias, arch="sm_90a"), Q)
        assert messages(caplog)[1:] == [
            "attention uses the default path for its forward and backward: "
            "bias: the kernels take alibi, relative, banded, and dense ones of an element a key"
        ]


@pytest.mark.parametrize("arch", ["sm_90", "sm_120a", 90, "cuda"])
def test_an_architecture_that_there_is_not(arch: Any):
    q = jnp.ones(Q.shape, Q.dtype)
    for run in (attention, explain):
        with pytest.raises(ValueError, match=rf"arch must be .*'sm_90a', 'sm_100f'.* got {arch!r}"):
            run(q, q, q, arch=arch)


def test_without_kernels_a_named_architecture_says_so(monkeypatch: pytest.MonkeyPatch):
    reason = "no kernels are installed: somewhere/manifest.json is missing"
    monkeypatch.setattr(runtime, "manifest", lambda: None)
    monkeypatch.setattr(runtime, "_installed", lambda: (None, reason))
    q = jnp.ones(Q.shape, Q.dtype)
    assert "no kernels are installed" in str(explain(q, q, q, arch="sm_100f").forward_reason)
    with pytest.raises(NotImplementedError, match=r"no kernels are installed: .*manifest\.json"):
        attention(q, q, q, arch="sm_90a", implementation="kernel")


@pytest.mark.parametrize("name", inspect.signature(attention).parameters)
def test_supports_and_explain_take_every_argument_of_attention(name: str):
    operands = {"query": Q, "key": Q, "value": Q}
    values = {
        "bias": jax.ShapeDtypeStruct((1, 1, 128, 128), jnp.float32),
        "mask": np.ones((1, 1, 128, 128), bool),
        "scale": 0.5,
        "query_offset": 3,
        "query_seq_lengths": [5, 6],
        "key_value_seq_lengths": np.array([5, 6]),
        "local_window_size": (3, None),
        "segment_ids": jax.ShapeDtypeStruct((1, 128), jnp.int32),
        "logits_soft_cap": 30.0,
        "sinks": jax.ShapeDtypeStruct(Q.shape[2:3], jnp.float32),
        "score_fn": lambda score, b, h, q, k: score,
        "numerics": "exact",
        "implementation": "xla",
        "arch": "sm_90a",
        **operands,
    }
    options: dict[str, Any] = operands | {name: values.get(name, True)}
    assert explain(**options).forward_flops > 0
    options |= {"arch": "sm_90a"}
    default_path = {"implementation", "score_fn"}
    assert bool(supports(**options)) == (name not in default_path)
    with pytest.raises(ValueError, match="return_residual must be"):
        supports(Q, Q, Q, return_residual=2)
    with pytest.raises(ValueError, match="implementation must be"):
        explain(Q, Q, Q, implementation="cudnn")
