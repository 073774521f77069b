"""Sizes of a launch, and the registers that a thread starts with."""

from __future__ import annotations

import dataclasses
import math

from kernels.emulator.ptx.syntax import Immediate, Kernel

REGISTERS_PER_SM = 65536
_MOST_REGISTERS = 255


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of a launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    dynamic_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return math.prod(self.block)

    @property
    def cluster_grid(self) -> tuple[int, int, int]:
        """Clusters of the grid."""
        (x, y, z), (width, height, depth) = self.grid, self.cluster
        return x // width, y // height, z // depth


def launch_registers(kernel: Kernel, threads: int) -> int:
    """Registers that a thread starts with, which PTX leaves to ptxas.

    A kernel with setmaxnreg gets what a CTA of this size can have beside as many others as the text
    wants on a multiprocessor (.minnctapersm), but no more than the largest setmaxnreg.inc asks for
    (as `ptxas -v`, version 13.0, says of kernels with other counts).
    """
    counts = [
        operand.value
        for instruction in kernel.instructions
        if instruction.opcode == "setmaxnreg" and instruction.words[1] == "inc"
        for operand in instruction.operands
        if isinstance(operand, Immediate)
    ]
    largest = max(counts, default=_MOST_REGISTERS)
    of_cta = REGISTERS_PER_SM // kernel.least_ctas
    return min(of_cta // threads // 8 * 8, _MOST_REGISTERS, largest)
