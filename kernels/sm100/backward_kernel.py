"""What both main backward kernels of Blackwell do around their roles: they set up and tear down."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernels.common import launches, resources
from kernels.common import ptx as common_ptx
from kernels.common.backward_schedule import Work
from kernels.common.hosts import BackwardHost
from kernels.common.resources import Maps, Shared
from kernels.common.schedule import synchronise
from kernels.common.state import Rows, make_optional_exponents, make_rows
from kernels.description import TENSOR_MEMORY_COLUMNS
from kernels.interface import (
    BackwardScalars,
    BiasBuffers,
    CapBuffer,
    RangeBuffers,
    RowBuffers,
    Sizes,
)
from kernels.sm100 import ptx
from kernels.sm100.backward_data import BackwardConfig, Call, assign, take_ticket, take_turns


class BackwardKernel(BackwardHost):
    """The kernel without its load and MMA roles; attributes are compile-time constants.

    A subclass has the methods `load`, `mma` and, for a pair of CTAs, `relay_loads`.

    Attributes:
      config: the constants that its roles share.
      row_roles: the roles that work row by row, `compute` and `reduce`.
    """

    config: BackwardConfig

    def __init__(self, config: BackwardConfig, row_roles: Any):
        self.config, self.row_roles = config, row_roles
        self.description, self.dtype = config.description, config.dtype
        self.counters = launches.counters_of(config.deterministic, self.description.division)
        self.deterministic = config.deterministic
        self.ranges = self.reads_cap = self.reads_mask = config.ranges
        self.bias = config.bias

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        buffers: RowBuffers,
        sizes: Sizes,
        scalars: BackwardScalars,
        ranges: RangeBuffers | None = None,
        cap: CapBuffer | None = None,
        bias: BiasBuffers | None = None,
    ):
        tile, description = self.config.tile, self.config.description
        pair = tile.ctas == 2
        shared = resources.allocate(description, self.config.dtype)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        reduce, compute = description.role("reduce"), description.role("compute")
        mma, load, order = (description.role(name) for name in ("mma", "load", "order"))
        if warp == mma.first_warp:
            cute.arch.alloc_tmem(TENSOR_MEMORY_COLUMNS, shared.tmem_base, pair)
            cute.arch.relinquish_tmem_alloc_permit(pair)
        if warp == load.first_warp:
            resources.prefetch(maps, description, stores=not pair)
            with cute.arch.elect_one():
                resources.initialise(description, shared.barriers)
        if cutlass.const_expr(self.config.deterministic):
            if warp == order.first_warp:
                take_ticket(self.config, shared, buffers.dq_ticket)
        cute.arch.mbarrier_init_fence()
        synchronise(self.config.tile.ctas)
        common_ptx.await_launch_before()

        call = Call(buffers.extents, sizes, scalars.window, ranges, bias)
        rows = make_rows(buffers, sizes.query_length, tile.m)
        # Each role computes its work by itself: if all shared the values, these would stay in
        # registers of every role.
        if warp < compute.first_warp:
            ptx.set_registers(reduce.registers)
            self.row_roles.reduce(shared, assign(self.config, shared, call), rows)
        elif warp < mma.first_warp:
            ptx.set_registers(compute.registers)
            work = assign(self.config, shared, call)
            exponents = make_optional_exponents(scalars, cap, bias)
            self.row_roles.compute(maps, shared, work, scalars.scale, exponents)
        else:
            ptx.set_registers(mma.registers)
            work = assign(self.config, shared, call)
            if warp == mma.first_warp:
                if cutlass.const_expr(pair):
                    if work.rank == 0:
                        self.mma(shared, work)
                    else:
                        self.relay_loads(shared, work)
                else:
                    self.mma(shared, work)
            elif warp == load.first_warp:
                self.load(maps, shared, work, rows)
            elif warp == order.first_warp:
                if cutlass.const_expr(self.config.deterministic):
                    take_turns(self.config, shared.barriers, work, rows)
        synchronise(self.config.tile.ctas)
        if warp == mma.first_warp:
            base = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_base)
            cute.arch.dealloc_tmem(base, TENSOR_MEMORY_COLUMNS, pair)

    def load(self, maps: Maps, shared: Shared, work: Work, rows: Rows):
        """Load warp: loads every operand into shared memory."""
        raise NotImplementedError

    def mma(self, shared: Shared, work: Work):
        """MMA warp, of the even CTA in a pair: issues all products."""
        raise NotImplementedError

    def relay_loads(self, shared: Shared, work: Work):
        """MMA warp of a pair's odd CTA: relays the completion of its loads to the even CTA."""
        raise NotImplementedError
