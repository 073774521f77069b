"""Every change of the Blackwell forward's synchronisation, and which of them are noticed.

    python -m tests.emulator.blackwell_mutations [--head-dim 128 256] [--band]

takes all mutations of the kernels; test_blackwell_mutations.py some of them. Scores grow from the
last key, where the kernels begin, to the first, and numerics are exact, so that every block
rescales; one CTA works on every tile.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.progress import track

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from kernels.emulator import Policy
from tests.emulator import attention
from tests.emulator.mutations import Mutation, Trial, mutations, notices

POLICIES = (
    Policy("random", "late", most_steps=100_000),
    Policy("starve", "random", global_races=True, most_steps=100_000),
    Policy("in_order", "early", most_steps=100_000),
)
PROCESSES = 2

_REGISTERS = "removed: setmaxnreg.inc.sync.aligned.u32"
_WAIT = "never waits: mbarrier.try_wait.parity.shared.b64"
SURVIVORS = {128: Counter({_REGISTERS: 1, _WAIT: 1}), 256: Counter({_REGISTERS: 1, _WAIT: 2})}
"""What is not noticed, by head dim.

PTX does not say how many registers a thread needs: ptxas does, and spills, which the build refuses.
The first blocks of K of a query tile go where the ring is empty: q_empty, for which the load warp
has waited, comes behind every product of the tile before. With one loop for all loads, a wait is
left out nowhere.
"""


def cases(head_dim: int, band: bool) -> tuple[Case, ...]:
    """Three tiles of four blocks; then padded keys: tiles of three blocks, none, one and one."""
    tile = {"head_dim": head_dim, "growing": True, "numerics": "exact", "is_causal": band}
    rows, block = (128, 64) if head_dim == 256 else (256, 128)
    return (
        Case(**tile, batch=1, heads=(1, 1), query_length=2 * rows + 40, key_length=3 * block + 9),
        Case(
            **tile,
            batch=4,
            heads=(1, 1),
            query_length=rows - 20,
            key_length=3 * block,
            query_offset=3 * block,
            key_lengths=(2 * block + 11, 0, block - 30, block - 20),
            poison=True,
        ),
    )


def trials(cases: Sequence[Case], policies: Sequence[Policy] = POLICIES) -> list[Trial]:
    """What every mutation is put through, in this order."""
    made = []
    for case in cases:
        inputs = attention.reversed_keys(case, make_inputs(case, 0))
        launch = attention.attention(case, inputs, gradients=False, arch="sm_100f")
        launch = dataclasses.replace(launch, multiprocessors=1)
        expected = launch.run(Policy())
        made += [Trial(launch, expected, policy, seed) for seed, policy in enumerate(policies)]
    return made


def broken(some: Sequence[Trial]) -> list[Mutation]:
    """All mutations of the kernel that is tried."""
    (key,) = some[0].launch.keys
    return list(mutations(attention.ptx(key).text))


_TRIALS: list[Trial] = []
"""What the processes of a pool inherit."""


def _notices(mutation: Mutation) -> str:
    return notices(_TRIALS, mutation)


def main() -> int:
    """Prints which mutations are noticed; returns 1 if others survive than SURVIVORS says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--band", action="store_true", help="the kernels for causal and windows")
    arguments, others = parser.parse_args(), False
    for head_dim in arguments.head_dim:
        _TRIALS[:] = trials(cases(head_dim, arguments.band))
        changed = broken(_TRIALS)
        attention.close()
        with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
            rules = list(track(pool.map(_notices, changed), f"d = {head_dim}", len(changed)))
        noticed = sum(map(bool, rules))
        print(
            f"d = {head_dim}: {noticed} of {len(changed)} noticed, {Counter(rules).most_common()}"
        )
        surviving = [m for m, rule in zip(changed, rules, strict=True) if not rule]
        for mutation in surviving:
            print(f"survives: line {mutation.line}, {mutation.change}")
        others |= Counter(mutation.kind for mutation in surviving) != SURVIVORS[head_dim]
    return int(others)


if __name__ == "__main__":
    raise SystemExit(main())
