"""From a parsed kernel to a program: which file makes the effect of an instruction."""

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
from kernels.emulator.ptx.parser import parameter_offsets
from kernels.emulator.ptx.program import Effect, Program, make_program
from kernels.emulator.ptx.syntax import Instruction, Kernel

_BINDERS = (
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

    def bind(instruction: Instruction) -> Effect | None:
        effects = (binder.bind(instruction, symbols) for binder in _BINDERS)
        try:
            return next((effect for effect in effects if effect is not None), None)
        except (AssertionError, IndexError, TypeError, ValueError) as error:
            message = f"line {instruction.line}: operands of another kind: {instruction.text}"
            raise PtxError(message) from error

    return make_program(kernel, symbols, bind), position - SHARED_BASE
