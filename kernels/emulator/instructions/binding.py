"""Makes a parsed kernel a program, by the table of all entries."""

from __future__ import annotations

from kernels.emulator.errors import PtxError
from kernels.emulator.instructions import (
    atom_red,
    bar,
    barrier_cluster,
    clusterlaunchcontrol,
    cp_async,
    cp_async_bulk,
    cp_async_bulk_tensor,
    fence,
    griddepcontrol,
    isspacep,
    ld_st,
    ldmatrix,
    mapa,
    mbarrier,
    mma_sync,
    mov,
    setmaxnreg,
    shfl_vote_elect,
    st_red_async,
    tcgen05_alloc,
    tcgen05_commit,
    tcgen05_cp,
    tcgen05_ld_st,
    tcgen05_mma,
    wgmma,
)
from kernels.emulator.machine.cta import SHARED_BASE
from kernels.emulator.ptx import arithmetic
from kernels.emulator.ptx.entries import CONTROL, Bound, Entry
from kernels.emulator.ptx.parser import parameter_offsets
from kernels.emulator.ptx.program import BRANCHES, Program, make_program
from kernels.emulator.ptx.syntax import Instruction, Kernel

_MODULES = (
    ld_st,
    shfl_vote_elect,
    setmaxnreg,
    bar,
    mbarrier,
    fence,
    cp_async_bulk_tensor,
    cp_async_bulk,
    wgmma,
    mapa,
    barrier_cluster,
    atom_red,
    ldmatrix,
    mma_sync,
    cp_async,
    isspacep,
    st_red_async,
    clusterlaunchcontrol,
    griddepcontrol,
    mov,
    tcgen05_alloc,
    tcgen05_commit,
    tcgen05_ld_st,
    tcgen05_mma,
    tcgen05_cp,
)
ENTRIES = {entry.words: entry for module in _MODULES for entry in module.ENTRIES}
"""Every instruction but arithmetic and branches, by the words of its mnemonic."""
assert len(ENTRIES) == sum(len(module.ENTRIES) for module in _MODULES)


def entry_of(words: tuple[str, ...]) -> Entry | None:
    """The entry of a mnemonic that is not arithmetic: the one that names most of its words."""
    if words in ENTRIES:
        return ENTRIES[words]
    prefixes = ((*words[:end], "*") for end in range(len(words), 0, -1))
    return next((ENTRIES[prefix] for prefix in prefixes if prefix in ENTRIES), None)


def kind_of(instruction: Instruction) -> str:
    """The class under which the report counts an instruction.

    Raises:
      PtxError: there is none like it.
    """
    if instruction.opcode in BRANCHES:
        return CONTROL.kind
    if instruction.mnemonic in arithmetic.OPERATIONS:
        return arithmetic.OPERATIONS[instruction.mnemonic].cost.kind
    entry = entry_of(instruction.words)
    if entry is None:
        raise PtxError(f"line {instruction.line}: not implemented: {instruction.text}")
    return entry.cost_of(instruction).kind


def bind_program(kernel: Kernel) -> tuple[Program, int]:
    """A kernel's program, and the bytes of its shared variables of fixed size."""
    tcgen05_alloc.check_groups(kernel.instructions)
    symbols, position = {}, SHARED_BASE
    for variable in sorted(kernel.shared, key=lambda variable: variable.size is None):
        position = -(-position // variable.alignment) * variable.alignment
        symbols[variable.name] = position
        position += variable.size or 0
    local = 0
    for variable in kernel.local:
        local = -(-local // variable.alignment) * variable.alignment
        symbols[variable.name] = local
        local += variable.size or 0
    symbols |= {variable.name: variable.address for variable in kernel.variables}
    offsets = parameter_offsets(kernel.parameters)
    for parameter, offset in zip(kernel.parameters, offsets, strict=True):
        symbols[parameter.name] = offset

    def bind(instruction: Instruction) -> Bound | None:
        entry = entry_of(instruction.words)
        try:
            effect = None if entry is None else entry.bind(instruction, symbols)
            if entry is None or effect is None:
                return None
            return Bound(effect, entry.cost_of(instruction))
        except (AssertionError, IndexError, TypeError, ValueError) as error:
            message = f"line {instruction.line}: operands of another kind: {instruction.text}"
            raise PtxError(message) from error

    return make_program(kernel, symbols, bind), position - SHARED_BASE
