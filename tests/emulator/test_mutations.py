"""How many single changes to a kernel's synchronisation are noticed.

Some changes are harmless: a wait or fence that another one implies, a last release that nobody
waits for, a commit that the next one makes up for. docs/notes/emulator.md explains the survivors.
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.key import Pass
from kernels.emulator import Policy
from tests.emulator.attention import attention, ptx
from tests.emulator.mutations import Trial, mutations, notices

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (
    Policy("random", "late", global_races=True, ordered_reductions=True, most_steps=300_000),
    Policy("starve", "random", global_races=True, most_steps=300_000),
)

CASES = (
    # Every ring slot is used again, every CTA of a persistent kernel gets two tiles.
    Case(batch=1, heads=(2, 1), query_length=260, key_length=260, deterministic=True),
    Case(
        batch=1,
        heads=(1, 1),
        query_length=200,
        key_length=300,
        key_lengths=(290,),
        deterministic=True,
        poison=True,
    ),
    Case(
        batch=1,
        heads=(1, 1),
        query_length=130,
        key_length=130,
        query_lengths=(120,),
        deterministic=True,
        poison=True,
    ),
)


@pytest.mark.parametrize(
    ("kernel", "least"),
    [(Pass.FORWARD, 0.95), (Pass.BACKWARD, 0.9), (Pass.BACKWARD_POST, 1.0)],
)
def test_broken_kernels_are_noticed(kernel: Pass, least: float) -> None:
    launches = [attention(case, make_inputs(case, 0)).only(kernel) for case in CASES]
    trials = [
        Trial(launch, expected, policy, seed)
        for launch, expected in [(launch, launch.run(Policy())) for launch in launches]
        for seed, policy in enumerate(POLICIES)
    ]
    (key,) = launches[0].keys
    broken = list(mutations(ptx(key).text, counts=False))
    rules = [notices(trials, mutation) for mutation in broken]
    noticed = sum(map(bool, rules))
    print(f"{key.name}: {noticed} of {len(broken)} noticed, {Counter(rules).most_common()}")
    for mutation, rule in zip(broken, rules, strict=True):
        if not rule:
            print(f"survives: line {mutation.line}, {mutation.change}")
    assert noticed >= least * len(broken)
