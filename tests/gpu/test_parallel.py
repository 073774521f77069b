"""Context parallelism runs the CPU's cases on the kernels and through NCCL, on 2 or 4 GPUs."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from fa4_jax import parallel
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.target import current_target
from tests.parallel_cases import (
    compiled,
    failures,
    make_layout,
    make_mesh,
    masks,
    received_bytes,
    schemes,
)

MASKS = masks(768, head_dim=128, heads=(8, 2))
FEW = ("dense", "causal with lengths", "window", "chunked prefill")


@pytest.fixture(autouse=True)
def gpus() -> int:
    """Returns how many GPUs share a sequence."""
    target = current_target()
    if target.arch is None:
        pytest.skip(target.unavailable)
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    return 4 if len(jax.devices()) >= 4 else 2


def name_of(x: parallel.Scheme) -> str:
    return f"{type(x).__name__}-{x.layout}"


def check(kind: AxisType, scheme: parallel.Scheme, mask: str, seed: int, **axes: int) -> None:
    names = {name: name if name in axes else None for name in ("data", "tensor")}
    layout = make_layout(
        make_mesh(kind, **axes), scheme, names["data"], names["tensor"], names["tensor"]
    )
    case, inputs = MASKS[mask], make_inputs(MASKS[mask], seed)
    program, placed = compiled(case, inputs, scheme, layout, kind, "kernel")
    assert not failures(case, inputs, layout, program(*placed))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", schemes("seq")[:2], ids=name_of)
def test_ring(scheme, mask, seed, gpus):
    check(AxisType.Manual, scheme, mask, seed, seq=gpus)


@pytest.mark.parametrize("mask", FEW)
@pytest.mark.parametrize("scheme", schemes("seq")[2:], ids=name_of)
def test_other_schemes(scheme, mask, seed, gpus):
    check(AxisType.Manual, scheme, mask, seed, seq=gpus)


@pytest.mark.parametrize("mask", FEW)
@pytest.mark.parametrize("scheme", schemes("ring", "ulysses"), ids=name_of)
def test_ring_of_ulysses(scheme, mask, seed, gpus):
    if gpus < 4:
        pytest.skip("needs four GPUs")
    check(AxisType.Manual, scheme, mask, seed, ring=2, ulysses=2)


@pytest.mark.parametrize("other", ["data", "tensor"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("scheme", schemes("seq")[1:5:2], ids=name_of)
def test_whole_arrays(scheme, kind, other, seed, gpus):
    if gpus < 4:
        pytest.skip("needs four GPUs")
    check(kind, scheme, "causal with lengths", seed, **{other: 2}, seq=2)


@pytest.mark.parametrize("scheme", schemes("seq"), ids=name_of)
def test_deterministic(scheme, seed, gpus):
    case = dataclasses.replace(MASKS["causal"], deterministic=True)
    inputs = make_inputs(case, seed)
    layout = make_layout(make_mesh(AxisType.Manual, seq=gpus), scheme)
    program, placed = compiled(case, inputs, scheme, layout, AxisType.Manual, "kernel")
    first = [np.asarray(x).tobytes() for x in program(*placed)]
    for _ in range(10):
        assert [np.asarray(x).tobytes() for x in program(*placed)] == first


def test_bytes_that_travel(seed, gpus):
    scheme, case = parallel.Ring("seq", "zigzag"), MASKS["causal"]
    layout = make_layout(make_mesh(AxisType.Manual, seq=gpus), scheme)
    inputs = make_inputs(case, seed)
    program, _ = compiled(case, inputs, scheme, layout, AxisType.Manual, "kernel")
    keys_and_values = 2 * inputs.key.size * 2  # the rate of bf16, on all devices together
    assert received_bytes(program) == {"collective-permute": 3 * (gpus - 1) * keys_and_values}
