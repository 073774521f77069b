"""Copies of query tiles, whose rows belong to one head or, unit by unit, to several."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import tensors
from kernels.sm100.forward_description import UNIT
from kernels.sm100.forward_schedule import Work

Atoms = tuple[cute.CopyAtom, cute.CopyAtom]
"""Copies of a unit, and of a whole tile."""


@cute.jit
def load(atoms: Atoms, target: cute.Tensor, work: Work, t: cutlass.Constexpr[int], full):
    """Loads query tile t of a CTA to shared memory, (rows, head_dim)."""
    rows, d = (cute.size(target, mode=[i]) for i in range(2))
    units = rows // UNIT
    if work.pack == 1:
        source = coordinates(work, t * units, (rows, d))
        tensors.tma_load(atoms[1], source, target, full)
    else:
        for unit in cutlass.range(units, unroll=1):
            source = coordinates(work, t * units + unit, (UNIT, d))
            place = cute.local_tile(target, (UNIT, d), (unit, 0))
            tensors.tma_load(atoms[0], source, place, full)


@cute.jit
def store(
    atoms: Atoms,
    source: cute.Tensor,
    work: Work,
    t: cutlass.Constexpr[int],
    column: Int32 | int = 0,
):
    """Stores columns of query tile t of a CTA, which lie in shared memory; one thread calls it.

    column: their place along head_dim, in widths of the source.
    """
    rows, width = (cute.size(source, mode=[i]) for i in range(2))
    units = rows // UNIT
    if work.pack == 1:
        target = coordinates(work, t * units, (rows, width), column)
        tensors.tma_store(atoms[1], source, target)
    else:
        for unit in cutlass.range(units, unroll=1):
            target = coordinates(work, t * units + unit, (UNIT, width), column)
            part = cute.local_tile(source, (UNIT, width), (unit, 0))
            tensors.tma_store(atoms[0], part, target)


def coordinates(
    work: Work, unit: Int32 | int, shape: tuple[int, int], column: Int32 | int = 0
) -> cute.Tensor:
    """Returns the TMA coordinates of a (rows, columns) shape from a unit of the tile on.

    column: the place along head_dim, in widths of the shape.
    """
    query, head = work.unit(unit)
    tensor = tensors.bthd_coordinates()[None, None, head, work.batch]
    return cute.local_tile(cute.domain_offset((query, 0), tensor), shape, (0, column))
