"""fa4_jax.attention and its gradients through the FFI handler and an emulated Blackwell.

As test_end_to_end.py, whose device is a Hopper.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator

import pytest

from fa4_jax import designs
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import names
from kernels.emulator.driver.driver import SETTINGS_VARIABLE
from tests.emulator import emulated_gpu
from tests.emulator.processes import HOW, Gpu, process

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

BLACKWELL = (
    Case(batch=1, heads=(2, 1), query_length=200, key_length=300),
    Case(
        batch=2,
        heads=(1, 1),
        query_length=200,
        key_length=260,
        is_causal=True,
        query_offset=(-40, 90),
        key_lengths=(100, 260),
        poison=True,
        dtype="fp16",
    ),
    Case(batch=1, heads=(1, 1), query_length=150, key_length=190, head_dim=72, numerics="exact"),
    Case(
        batch=1,
        heads=(1, 1),
        query_length=70,
        key_length=140,
        head_dim=192,
        value_dim=128,
        dtype="fp16",
    ),
    Case(
        batch=1,
        heads=(2, 1),
        query_length=70,
        key_length=150,
        head_dim=192,
        is_causal=True,
        query_offset=80,
        deterministic=True,
    ),
    Case(
        batch=1,
        heads=(2, 1),
        query_length=150,
        key_length=150,
        head_dim=128,
        is_causal=True,
        masks=("segments",),
        sinks=True,
    ),
    Case(
        batch=1,
        heads=(1, 1),
        query_length=140,
        key_length=300,
        head_dim=192,
        value_dim=128,
        masks=("scattered",),
        deterministic=True,
    ),
)
"""The fourth and the last two have pairs in the backward."""


@pytest.mark.parametrize(
    ("case", "how"),
    list(zip(BLACKWELL, itertools.cycle(HOW), strict=False)),
    ids=lambda value: value.id if isinstance(value, Case) else "",
)
def test_blackwell_conforms(blackwell: Gpu, case: Case, how: str, seed: int) -> None:
    verdicts = blackwell(emulated_gpu.verdicts, case, seed, f"{how} start_order=reversed")
    assert [verdict.name for verdict in verdicts] == list(names(case))
    assert not [verdict for verdict in verdicts if verdict.failure]


@pytest.fixture(scope="module")
def pairs(variables: dict[str, str]) -> Iterator[Gpu]:
    """An emulated Blackwell where pairs of CTAs run whatever has both designs."""
    capability = {SETTINGS_VARIABLE: "capability=10.0"}
    yield from process(variables | capability | {designs.VARIABLE: "pair"})


def cases_of_pairs() -> Iterator[Case]:
    """Every forward and backward kernel for pairs, where there is one for a single CTA, too."""
    for dtype, d, deterministic in itertools.product(("bf16", "fp16"), (64, 128, 192), (0, 1)):
        common = {"batch": 1, "heads": (2, 1), "query_length": 150, "key_length": 300}
        common |= {"dtype": dtype, "head_dim": d, "deterministic": bool(deterministic)}
        common |= {"value_dim": 128} if d == 192 else {}
        common |= {"numerics": "exact"} if deterministic else {}
        yield Case(**common)
        yield Case(**common, is_causal=True, query_offset=150)
        yield Case(**common, is_causal=True, query_offset=150, masks=("scattered",))
        yield Case(**common, soft_cap=4.0, sinks=True)


PAIRS = tuple(cases_of_pairs())
"""All 48 take four minutes; a run of the tests takes four of them."""


@pytest.mark.parametrize("case", PAIRS[2::13], ids=lambda case: case.id)
def test_pairs_conform(pairs: Gpu, case: Case, seed: int) -> None:
    ways = HOW if case.deterministic else HOW[:-1]  # The last asks for one order of additions.
    verdicts = pairs(emulated_gpu.verdicts, case, seed, ways[seed % len(ways)])
    assert [verdict.name for verdict in verdicts] == list(names(case))
    assert not [verdict for verdict in verdicts if verdict.failure]
