"""The project's Hopper kernels on the emulator: right by the oracle, whatever the timing."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

import numpy as np
import pytest

from fa4_jax import designs
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, make_inputs, oracle, ordinary
from fa4_jax.key import KernelKey, Pass
from kernels.descriptions import describe
from kernels.emulator import EmulationError, Policy, launch
from kernels.emulator.driver import arguments
from tests.emulator.attention import attention, ptx

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (
    Policy("random", "late", start_order="random", global_races=True),
    Policy("starve", "random", start_order="reversed", global_races=True),
    Policy("random", "early"),
    Policy("in_order", "late", resident_ctas=1, start_order="reversed"),
    Policy("starve", "late", resident_ctas=1, start_order="random"),
)

CASES = (
    Case(batch=1, heads=(1, 1), query_length=200, key_length=300),
    Case(batch=1, heads=(1, 1), query_length=200, key_length=300, growing=True, is_causal=True),
    Case(batch=1, heads=(2, 1), query_length=130, key_length=275, window=(50, 70)),
    Case(batch=1, heads=(1, 1), query_length=1, key_length=129, head_dim=128),
    Case(
        batch=2,
        heads=(1, 1),
        query_length=150,
        key_length=190,
        query_lengths=(70, 149),
        key_lengths=(0, 130),
        poison=True,
    ),
    Case(batch=1, heads=(2, 1), query_length=129, key_length=257, head_dim=128, is_causal=True),
    Case(
        batch=1,
        heads=(1, 1),
        query_length=100,
        key_length=260,
        head_dim=128,
        is_causal=True,
        query_offset=160,
        dtype="fp16",
        numerics="exact",
        deterministic=True,
    ),
    Case(batch=1, heads=(1, 1), query_length=150, key_length=190, head_dim=72),
    Case(batch=1, heads=(1, 1), query_length=140, key_length=140, head_dim=96, is_causal=True),
    Case(batch=1, heads=(1, 1), query_length=129, key_length=200, head_dim=192),
    Case(batch=1, heads=(1, 1), query_length=129, key_length=130, head_dim=256, is_causal=True),
    Case(
        batch=1,
        heads=(1, 1),
        query_length=70,
        key_length=140,
        head_dim=256,
        key_lengths=(100,),
        poison=True,
        deterministic=True,
    ),
)


@pytest.mark.parametrize(
    ("case", "policy"),
    list(zip(CASES, itertools.cycle(POLICIES), strict=False)),
    ids=lambda value: value.id if isinstance(value, Case) else "",
)
def test_agrees_with_oracle(case: Case, policy: Policy, seed: int) -> None:
    inputs = make_inputs(case, seed)
    results = attention(case, inputs).run(policy, seed)
    with np.errstate(all="ignore"):
        expected = oracle(case, inputs)
        usual = [ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS]
        verdicts = [
            compare(name, case.dtype, results[name], value, [some[name] for some in usual])
            for name, value in expected.items()
        ]
    assert len(verdicts) == 5
    assert not [verdict for verdict in verdicts if verdict.failure]


def test_deterministic_backward_ignores_timing(seed: int) -> None:
    """The order in which dQ is summed over key tiles is the kernel's, not the schedule's, nor that
    in which CTAs start, one at a time or several."""
    case = Case(
        batch=1,
        heads=(2, 1),
        query_length=130,
        key_length=300,
        is_causal=True,
        query_offset=100,
        deterministic=True,
    )
    launches = attention(case, make_inputs(case, seed)).after(Pass.FORWARD)
    ordered = (dataclasses.replace(policy, ordered_reductions=True) for policy in POLICIES)
    first, *others = (launches.run(policy, seed + i) for i, policy in enumerate(ordered))
    for other, (name, value) in itertools.product(others, first.items()):
        assert np.array_equal(value, other[name]), name


@pytest.mark.parametrize(
    ("head_dim", "short"), [(64, False), (64, True), (96, False), (96, True), (128, False)]
)
def test_tickets_deal_every_tile_once(head_dim: int, short: bool, seed: int) -> None:
    """The results' bits depend neither on the number of CTAs nor on the order in which they start.

    A CTA takes a ticket with each of its tiles.
    """
    key = KernelKey("sm_90a", Pass.FORWARD, "bf16", head_dim, band=True, short=short)
    division = describe(key).division
    assert division.by_ticket
    heads, rows, tiles_of_head = 2, division.rows, 3
    length = tiles_of_head * rows - 40
    case = Case(
        batch=1,
        heads=(heads, 1),
        query_length=length,
        key_length=394,  # The first rows see no key.
        head_dim=head_dim,
        is_causal=True,
        query_offset=-rows,
    )
    inputs, design = make_inputs(case, seed), designs.design_of(key)
    launches = attention(case, inputs, gradients=False, design=design)
    assert launches.keys[0] == key
    code, first = ptx(launches.keys[0]), dict[str, np.ndarray]()
    for number, policy in enumerate(POLICIES):
        processors = 1 + number * 2 % 5
        packed = arguments.pack(code.launch, launches.arrays, launches.attributes, processors)
        launch(code.text, code.symbol, **packed.keywords, policy=policy, seed=seed + number)
        assert packed.results.pop("tile_ticket") == heads * tiles_of_head
        first = first or packed.results
        for name, value in packed.results.items():
            assert np.array_equal(value, first[name]), (name, processors, policy)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "ranges"),
    [
        *((64, True), (96, False), (128, False)),
        *(pytest.param(*pairs, marks=pytest.mark.slow) for pairs in ((192, True), (256, False))),
    ],
)
def test_tickets_deal_every_key_tile_once(
    head_dim: int, ranges: bool, deterministic: bool, seed: int
) -> None:
    """dK's and dV's bits depend neither on the number of CTAs nor on the order in which they start.

    Nor, with d = 192 and 256, on the number of pairs of CTAs. Some key tiles are seen by no query.
    """
    heads, tiles_of_head = 2, 3
    case = Case(
        batch=1,
        heads=(heads, heads),
        query_length=200,
        key_length=tiles_of_head * 128 - 30,
        head_dim=head_dim,
        is_causal=True,
        query_offset=50,
        masks=("segments",) if ranges else (),
        deterministic=deterministic,
    )
    launches = attention(case, make_inputs(case, seed)).after(Pass.FORWARD)
    first = dict[str, np.ndarray]()
    for number, policy in enumerate(POLICIES):
        ordered = dataclasses.replace(policy, ordered_reductions=deterministic)
        processors = 1 + number * 2 % 5
        launched = dataclasses.replace(launches, multiprocessors=processors)
        results = launched.run(ordered, seed + number)
        first = first or results
        for name in ("dk", "dv", *(["dq"] if deterministic else [])):
            assert np.array_equal(results[name], first[name]), (name, processors, policy)


@pytest.mark.parametrize(("arch", "barrier"), [("sm_90a", "k_empty"), ("sm_100f", "p_early")])
def test_a_deadlock_names_the_barrier(arch: str, barrier: str) -> None:
    """Without the arrivals on a barrier somebody waits for it, by its name in the description."""
    case = Case(batch=1, heads=(1, 1), query_length=128, key_length=600)
    launches = attention(case, make_inputs(case, 0), gradients=False, arch=arch)
    description = describe(launches.keys[0])
    (first,) = (at for one, at in description.first_barriers() if one.name == barrier)
    arrivals = description.arrivals(description.barrier(barrier))

    def one_more(key: KernelKey, text: str) -> str:
        """The barrier's first mbarrier waits for an arrival that never comes."""
        lines = [line for line in text.splitlines() if "mbarrier.init" in line]
        broken = lines[first].replace(lines[first].split()[-1], f"{arrivals + 1};")
        return text.replace(lines[first], broken)

    with pytest.raises(EmulationError, match=rf"mbarrier {barrier}\[0\] \(0x"):
        launches.run(Policy(), 0, one_more)
