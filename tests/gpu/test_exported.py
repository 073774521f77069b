"""Programs that a machine without a GPU exported run the kernels here, and give right results."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, make_inputs, oracle, ordinary
from fa4_jax.target import current_target
from tests.gpu import exported as made

OTHER_SIZES = dataclasses.replace(
    made.CASE, batch=3, query_length=129, key_length=1030, key_lengths=(1030, 1, 500)
)


@pytest.fixture(autouse=True)
def kernels() -> None:
    target = current_target()
    if target.arch != made.ARCH or jax.default_backend() != "gpu":
        pytest.skip(f"the programs are for {made.ARCH}: {target.unavailable or target.arch}")
    if not made.FOLDER.exists():
        pytest.skip("there are no programs: run python -m tests.gpu.exported without a GPU")


def arguments(case: Case, seed: int) -> tuple[Any, Any]:
    inputs = make_inputs(case, seed)
    bars = (inputs.output_bar, inputs.lse_bar)
    lengths = np.asarray(case.key_lengths, np.int32)
    args = (inputs.query, inputs.key, inputs.value, lengths, bars)
    return inputs, jax.tree.map(jnp.asarray, args)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("fixed", made.CASE),
        ("symbolic_batch", made.CASE),
        ("symbolic_batch", dataclasses.replace(made.CASE, batch=1, key_lengths=(30,))),
        ("symbolic", made.CASE),
        ("symbolic", OTHER_SIZES),
    ],
)
def test_kernels_run_and_are_right(name: str, case: Case, seed: int):
    blob = (made.FOLDER / name).read_bytes()
    program = jax.export.deserialize(bytearray(blob))
    assert program.platforms == ("cuda",)
    text = program.mlir_module()
    # There are four launches, and no loop of the default path: nothing else can have run.
    assert text.count('kernel = "sm_90a_') == 4 and "stablehlo.while" not in text
    inputs, args = arguments(case, seed)
    found = program.call(*args)
    direct = jax.jit(functools.partial(made.both_ways, implementation="kernel"))(*args)
    for x, y in zip(found, direct, strict=True):
        np.testing.assert_array_equal(x, y)
    truth = oracle(case, inputs)
    usual = [ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS]
    for which, result in zip(("output", "lse", "dq", "dk", "dv"), found, strict=True):
        rounded = [x[which] for x in usual]
        verdict = compare(which, case.dtype, np.asarray(result), truth[which], rounded)
        assert verdict.failure is None, f"{which}: {verdict.failure}"
