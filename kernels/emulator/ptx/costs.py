"""What the steps of a program cost by their text, added up from the costs of its instructions."""

from __future__ import annotations

import dataclasses

import numpy as np

from kernels.emulator.ptx.program import Program, priced

QUANTITIES = {
    "special_function_ops": "results of the special function unit, one per lane",
    "mma_flops": "multiplications and additions of matrix products",
    "global_read_bytes": "by ld.global",
    "global_written_bytes": "by st.global",
    "global_reduced_bytes": "by red and atom",
    "tma_loaded_bytes": "written to shared memory by bulk and tensor loads, zero fill included",
    "tma_stored_bytes": "read from shared memory by bulk and tensor stores",
    "shared_read_bytes": "by ld.shared and ldmatrix",
    "shared_written_bytes": "by st.shared and stmatrix",
    "shared_mma_bytes": "read from shared memory by matrix products: A once a warp, B once a group",
    "distributed_read_bytes": "by ld.shared::cluster",
    "distributed_written_bytes": "by st.shared::cluster",
    "tensor_read_bytes": "by tcgen05.ld",
    "tensor_written_bytes": "by tcgen05.st and tcgen05.cp",
    "mbarrier_waits": "mbarrier waits that ended, retries not counted",
    "named_barrier_waits": "bar.sync",
}
"""Everything that is counted but instructions, and what it means."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the steps of a program cost.

    Attributes:
      mnemonics: of the columns of `mix`.
      kinds: the class of each mnemonic.
      mix: (steps, mnemonics), how many instructions of each a step has.
      per_lane, per_warp: (steps, quantities), what an active lane and an execution add.
    """

    mnemonics: tuple[str, ...]
    kinds: dict[str, str]
    mix: np.ndarray
    per_lane: np.ndarray
    per_warp: np.ndarray


def costs(program: Program) -> Costs:
    """The static costs of a program."""
    quantities = {name: i for i, name in enumerate(QUANTITIES)}
    mnemonics: dict[str, int] = {}
    kinds: dict[str, str] = {}
    entries: list[tuple[int, int]] = []
    shape = (len(program.steps), len(quantities))
    per_lane, per_warp = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for number, step in enumerate(program.steps):
        for instruction, cost in priced(step):
            column = mnemonics.setdefault(instruction.mnemonic, len(mnemonics))
            kinds[instruction.mnemonic] = cost.kind
            entries.append((number, column))
            for table, added in ((per_lane, cost.per_lane), (per_warp, cost.per_warp)):
                for name, amount in added.items():
                    table[number, quantities[name]] += amount
    mix = np.zeros((len(program.steps), len(mnemonics)), np.int64)
    np.add.at(mix, tuple(np.array(entries).T), 1)
    return Costs(tuple(mnemonics), kinds, mix, per_lane, per_warp)
