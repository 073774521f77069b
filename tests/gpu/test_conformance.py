"""Every conformance case runs on the kernels, and the deterministic gradients are deterministic."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.conformance.cases import CASES, MASKED_BIASES, Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.conformance.runner import compute, run_case
from fa4_jax.key import Pass
from fa4_jax.target import current_target


@functools.cache
def why_not() -> str | None:
    """Returns why the kernels cannot run here, or None."""
    target = current_target()
    if target.arch is None or target.manifest is None:
        return target.unavailable
    missing = set(catalogue.keys(target.arch)) - set(target.manifest.cubins)
    return f"not built: {min(missing).name}" if missing else None


@pytest.fixture(autouse=True)
def kernels() -> None:
    if reason := why_not():
        pytest.skip(reason)


KERNEL_CASES = [case for case in CASES if case.has_kernel]


@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.id)
def test_kernels(case: Case, seed: int):
    failures = [f"{v.name}: {v.failure}" for v in run_case(case, seed, "kernel") if v.failure]
    assert not failures, "\n".join(failures)


OTHERS = [
    case for case in CASES if not case.has_kernel and case.has_kernels("sm_90a", Pass.FORWARD)
]


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.id)
def test_what_not_every_architecture_takes(case: Case, seed: int):
    """Row masks, sinks, largest scores and caps, with gradients where there are kernels."""
    arch = current_target().arch or ""
    if not case.has_kernels(arch, Pass.FORWARD):
        pytest.skip(f"no kernel of {arch} takes the case")
    gradients = case.has_kernels(arch, Pass.BACKWARD)
    verdicts = run_case(case, seed, "kernel", gradients)
    failures = [f"{v.name}: {v.failure}" for v in verdicts if v.failure]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("case", MASKED_BIASES, ids=lambda case: case.id)
def test_masks_in_a_bias(case: Case, seed: int):
    failures = [f"{v.name}: {v.failure}" for v in run_case(case, seed, "kernel") if v.failure]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("masks", [(), ("scattered",)], ids=["band", "scattered"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_deterministic_gradients_are_bitwise_equal(
    head_dim: int, masks: tuple[str, ...], seed: int
):
    if masks and current_target().arch != "sm_90a":
        pytest.skip("Hopper's kernels alone take row masks")
    case = Case(
        head_dim=head_dim,
        heads=(4, 2),
        query_length=1100,
        key_length=1300,
        is_causal=True,
        query_offset=200,
        masks=masks,
        deterministic=True,
    )
    inputs = make_inputs(case, seed)
    first = compute(case, inputs, "kernel")
    for _ in range(40):
        again = compute(case, inputs, "kernel")
        for name, value in first.items():
            np.testing.assert_array_equal(again[name], value, err_msg=name)
