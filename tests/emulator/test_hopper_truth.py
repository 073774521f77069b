"""The emulated sm_90a kernels give what an H200 gave for the same inputs (`truth`).

The order of additions inside a product is the hardware's own, so a result may differ in the last
place; how often and by how much is bounded below, by storage type and quantity. About 30 s.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from fa4_jax import tile_choice
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import STORAGE, make_inputs
from kernels.emulator import Policy
from tests.emulator import truth
from tests.emulator.attention import attention
from tests.sampling import features, sampled

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)


BOUNDS = {
    # type of the result: (share of bitwise equal values at least, difference at most relative to
    # the largest value: one unit in its last place). The LSE is fp32 from approximate exponentials
    # and logarithms, so most of its last places differ; a few units are allowed, no share is asked.
    "bf16": (0.95, 2.0**-7),
    "fp16": (0.9, 2.0**-10),
    "lse": (0.0, 4 * 2.0**-23),
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(truth.PATH) as file:
        return dict(file)


@pytest.mark.parametrize(
    "case",
    sampled(
        [(case,) for case in truth.CASES],
        lambda case: (
            features(case) | {(case.head_dim, case.dtype), (case.head_dim, case.is_causal)}
        ),
    ),
    ids=lambda case: case.id,
)
def test_gives_what_hardware_gave(
    case: Case, recorded: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was recorded ran on blocks of 128 keys.
    monkeypatch.setattr(tile_choice, "NARROW_TILES", {})
    inputs = make_inputs(case, truth.SEED)
    assert truth.digest(inputs) == str(recorded[f"{case.id}/inputs"])
    results = attention(case, inputs).run(Policy("in_order", "early", races=False))
    compared = 0
    for name, value in results.items():
        if f"{case.id}/{name}" not in recorded:
            continue
        ours, theirs = truth.sample(name, value), recorded[f"{case.id}/{name}"]
        kind = np.dtype(np.float32) if name == "lse" else STORAGE[case.dtype]
        emulated, measured = (bits.view(kind).astype(np.float64) for bits in (ours, theirs))
        equal, difference = BOUNDS[name if name == "lse" else case.dtype]
        assert np.mean(ours == theirs) >= equal, name
        assert np.abs(emulated - measured).max() <= difference * np.abs(measured).max(), name
        compared += 1
    assert compared == 5
