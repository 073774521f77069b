"""What the warps of a launch have done: executions of steps, and lanes that sat out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kernels.emulator.ptx.costs import QUANTITIES, Costs
from kernels.emulator.ptx.program import LANES, Program, Run


@dataclasses.dataclass
class Tally:
    """What one warp index has done, over all CTAs.

    Attributes:
      counts: executions of every step.
      idle: lanes that sat out, summed over the executions of every step.
      extra: quantities that only the run knows.
    """

    counts: list[int]
    idle: list[int]
    extra: Counter[str]

    @classmethod
    def of(cls, program: Program) -> Tally:
        """Nothing yet."""
        steps = len(program.steps)
        return cls([0] * steps, [0] * steps, Counter())

    def instructions(self, static: Costs) -> Counter[str]:
        """Executions by mnemonic."""
        sums = np.array(self.counts) @ static.mix
        pairs = zip(static.mnemonics, sums.tolist(), strict=True)
        return Counter({name: count for name, count in pairs if count})

    def quantities(self, static: Costs) -> Counter[str]:
        """Every quantity that is not zero."""
        counts = np.array(self.counts)
        lanes = LANES * counts - np.array(self.idle)
        sums = lanes @ static.per_lane + counts @ static.per_warp
        total = Counter(dict(zip(QUANTITIES, sums.tolist(), strict=True)))
        unknown = self.extra.keys() - QUANTITIES.keys()
        if unknown:
            raise KeyError(f"no such quantities: {unknown}")
        total.update(self.extra)
        return Counter({name: amount for name, amount in total.items() if amount})


def executed(program: Program, tallies: Sequence[Tally]) -> frozenset[int]:
    """Positions in the kernel's text of the instructions that some lane has executed."""
    lanes = sum(LANES * np.array(tally.counts) - np.array(tally.idle) for tally in tallies)
    found, position = set(), 0
    for step, some in zip(program.steps, np.asarray(lanes) > 0, strict=True):
        size = len(step.instructions) if isinstance(step, Run) else 1
        if some:
            found.update(range(position, position + size))
        position += size
    return frozenset(found)
