"""The split forward on the emulator: any number of parts, on both architectures.

The conformance cases that are small enough to emulate have a block or two in each part; here a part
has several, so that every slot of the ring is used again. About 40 s.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

import numpy as np
import pytest

from fa4_jax.catalogue import ARCHITECTURES
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, make_inputs, oracle, ordinary
from kernels.emulator import Policy
from tests.emulator.attention import attention
from tests.emulator.split_launches import in_pages, in_parts

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (
    Policy("random", "late", start_order="random", global_races=True),
    Policy("starve", "random", start_order="reversed", global_races=True),
    Policy("random", "early"),
    Policy("in_order", "late", resident_ctas=1, start_order="reversed"),
)
CASES = (
    (Case(batch=1, heads=(3, 1), query_length=1, key_length=1300, head_dim=128, growing=True), 1),
    (Case(batch=1, heads=(8, 1), query_length=3, key_length=900, is_causal=True), 1),
    (Case(batch=1, heads=(4, 1), query_length=16, key_length=500, head_dim=128), 2),
    (
        Case(
            batch=2,
            heads=(16, 1),
            query_length=4,
            key_length=1111,
            head_dim=96,
            is_causal=True,
            query_offset=(996, 40),
            key_lengths=(1000, 44),
            poison=True,
        ),
        3,
    ),
    (Case(batch=1, heads=(5, 1), query_length=40, key_length=300, head_dim=192, value_dim=128), 2),
    (
        Case(
            batch=1,
            heads=(2, 1),
            query_length=10,
            key_length=600,
            head_dim=256,
            window=(300, 0),
            query_offset=500,
        ),
        1,
    ),
    (
        Case(
            batch=2,
            heads=(6, 2),
            query_length=7,
            key_length=900,
            head_dim=128,
            masks=("scattered", "ranges"),
            soft_cap=10.0,
            sinks=True,
            max_logit=True,
        ),
        2,
    ),
    (
        Case(
            batch=1,
            heads=(2, 1),
            query_length=160,
            key_length=400,
            is_causal=True,
            query_offset=240,
            masks=("segments",),
            max_logit=True,
        ),
        3,
    ),
)

WHOLE = tuple((case, 1) for case, parts in CASES if parts > 1)
"""The same with all keys in one part, which is not joined."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("case", "parts", "policy"),
    [
        (*pair, policy)
        for pair, policy in zip((*CASES, *WHOLE), itertools.cycle(POLICIES), strict=False)
    ],
    ids=lambda value: value.id if isinstance(value, Case) else "",
)
def test_agrees_with_oracle(arch: str, case: Case, parts: int, policy: Policy, seed: int) -> None:
    inputs = make_inputs(case, seed)
    launches = in_parts(attention(case, inputs, False, arch), case, parts)
    results = launches.run(policy, seed)
    with np.errstate(all="ignore"):
        expected = oracle(case, inputs)
        usual = [ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS]
    for name in ("output", "lse", *(["max_logit"] if case.max_logit else [])):
        others = [some[name] for some in usual]
        assert not compare(name, case.dtype, results[name], expected[name], others).failure


PAGED = (
    (Case(batch=2, heads=(4, 1), query_length=1, key_length=320, head_dim=128), 64),
    (Case(batch=2, heads=(8, 2), query_length=3, key_length=640, dtype="fp16"), 128),
    (Case(batch=3, heads=(4, 1), query_length=2, key_length=240, head_dim=96), 48),
    (Case(batch=2, heads=(6, 2), query_length=5, key_length=288, head_dim=256, value_dim=192), 16),
    (Case(batch=2, heads=(4, 1), query_length=3, key_length=320, sinks=True, soft_cap=3.0), 64),
    (Case(batch=2, heads=(20, 2), query_length=4, key_length=336, head_dim=128), 48),
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("case", "page", "policy"),
    [(*pair, policy) for pair, policy in zip(PAGED, itertools.cycle(POLICIES), strict=False)],
    ids=lambda value: value.id if isinstance(value, Case) else "",
)
def test_pages_give_the_bits_of_the_same_keys_in_order(
    arch: str, case: Case, page: int, policy: Policy, seed: int
) -> None:
    """Pages in any order; what lies past the lengths may be anything, as may the table there."""
    rng = np.random.default_rng(seed)
    last = case.key_length - page // 2
    lengths = tuple(int(x) for x in rng.integers(case.query_length, last, case.batch))
    offsets = tuple(length - case.query_length for length in lengths)
    case = dataclasses.replace(
        case, key_lengths=lengths, is_causal=True, query_offset=offsets, poison=True
    )
    launches = in_parts(attention(case, make_inputs(case, seed), False, arch), case, 2)
    expected = launches.run(Policy(), seed)
    paged = in_pages(launches, lengths, page, rng)
    results = paged.run(policy, seed)
    assert all(np.array_equal(results[name], expected[name]) for name in ("output", "lse"))


def test_neither_timing_nor_neighbours_change_bits(seed: int) -> None:
    """A batch entry's bits are those that it has alone; other keys in its padding change none."""
    case = Case(
        batch=2,
        heads=(4, 1),
        query_length=2,
        key_length=700,
        is_causal=True,
        query_offset=(498, 148),
        key_lengths=(500, 150),
        poison=True,
    )
    inputs = make_inputs(case, seed)
    launches = in_parts(attention(case, inputs, False), case, 3)
    first, *others = (launches.run(policy, seed + i) for i, policy in enumerate(POLICIES))
    for other in others:
        assert all(np.array_equal(first[name], other[name]) for name in ("output", "lse"))
    names = ("q", "k", "v", "extents")
    alone = {name: launches.arrays[name][1:].copy() for name in names}
    alone["k"][:, 150:], alone["v"][:, 150:] = 7, -3
    other = dataclasses.replace(launches, arrays=launches.arrays | alone).run(Policy(), seed)
    assert all(np.array_equal(first[name][1:], other[name]) for name in ("output", "lse"))
