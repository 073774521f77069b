"""Shared memory, mbarriers and named barriers of a kernel, made from its description."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from kernels.common import tensors
from kernels.common.ring import Ring
from kernels.description import Barrier, Description, NamedBarrier, Region

_SWIZZLED_RANK = 3


class Barriers:
    """The mbarriers of a description: a ring for every name."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Ring: ...


class Shared:
    """Shared memory of a description: a tensor for every region, by name.

    A region that is a single value is a pointer.
    """

    barriers: Barriers

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Maps:
    """TMA descriptors of [batch, length, heads, head_dim] tensors, by name in a description."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> cute.CopyAtom: ...


@functools.cache
def with_fields(base: type, names: tuple[str, ...]) -> type:
    """Makes a dataclass with these fields.

    CuTe-DSL carries only such objects through control flow.
    """
    return dataclasses.make_dataclass(base.__name__, names, bases=(base,), frozen=True)


def allocate(description: Description, dtype: Any) -> Shared:
    """Allocates the shared memory of a kernel whose storage type is `dtype`."""
    elements = {"operand": dtype, "f32": Float32, "i32": Int32}
    fields: dict[str, Any] = {
        "barriers": cute.struct.MemRange[cutlass.Int64, description.barrier_count]
    }
    for region in description.regions:
        if not region.shares:
            fields[region.name] = _field(region, elements[region.element])
    storage = cutlass.memory.SmemAllocator().allocate(
        cute.struct(type("Storage", (), {"__annotations__": fields}))
    )
    barriers = {
        barrier.name: Ring(storage.barriers.data_ptr() + first, barrier.count)
        for barrier, first in description.first_barriers()
    }
    memory = {
        region.name: _tensor(region, getattr(storage, region.shares or region.name), dtype)
        for region in description.regions
    }
    memory["barriers"] = with_fields(Barriers, tuple(barriers))(**barriers)
    return with_fields(Shared, tuple(memory))(**memory)


def _field(region: Region, element: Any) -> Any:
    if not region.shape:
        return element
    size = region.num_bytes // (element.width // 8)
    return cute.struct.Align[cute.struct.MemRange[element, size], region.alignment]


def _tensor(region: Region, field: Any, dtype: Any) -> Any:
    if not region.shape:
        return field.ptr
    if not region.span_bytes:
        own = {"operand": dtype, "f32": Float32, "i32": Int32}[region.element]
        return field.get_tensor(cute.make_layout(region.shape), dtype=own)
    rows, columns, *stages = region.shape
    if region.transposed:
        rows, columns = columns, rows
    layout = tensors.tile_layout(dtype, rows, columns, *(stages or [1]), region.span_bytes)
    if region.transposed:
        layout = tensors.transposed(layout)
    tensor = tensors.smem_tensor(field, layout, dtype)
    return tensor if len(region.shape) == _SWIZZLED_RANK else tensor[None, None, 0]


def initialise(description: Description, barriers: Barriers):
    """Initialises all mbarriers; one thread calls it and fences afterwards."""
    for barrier in description.barriers:
        for i in range(barrier.count):
            number = _arrivals(description, barrier)
            cute.arch.mbarrier_init(getattr(barriers, barrier.name).first + i, number)


def _arrivals(description: Description, barrier: Barrier) -> Int32:
    """Counts the arrivals that complete a phase in this CTA."""
    in_odd = Int32(description.arrivals(barrier, even_cta=False))
    if not barrier.of_pair:
        return in_odd
    even = cute.arch.block_idx_in_cluster() == 0
    return Int32(cutlass.select_(even, Int32(description.arrivals(barrier)), in_odd))


def meet(barrier: NamedBarrier, index: Int32 | int = 0):
    """Waits at the index-th named barrier of a name until all of its threads are there."""
    cute.arch.barrier(barrier_id=barrier.first + index, number_of_threads=barrier.threads)


def arrive(barrier: NamedBarrier, index: Int32 | int = 0):
    """Arrives at the index-th named barrier of a name, without waiting."""
    cute.arch.barrier_arrive(barrier_id=barrier.first + index, number_of_threads=barrier.threads)


def prefetch(maps: Maps, description: Description, stores: bool = True):
    """Prefetches the descriptors, by one warp.

    With `stores` it includes those that the kernel stores by.
    """
    for wanted in description.maps:
        if stores or not wanted.store:
            cpasync.prefetch_descriptor(getattr(maps, wanted.name))
