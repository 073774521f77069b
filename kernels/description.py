"""What a kernel consists of, as data that plain Python reads; nothing here needs CuTe-DSL.

A description names a kernel's warp roles, its mbarriers and named barriers, its regions of shared
memory and its columns of tensor memory. The kernel allocates and initialises from it
(`kernels.common.resources`); the manifest's launch, the emulator's reports, the tests of budgets
and the diagrams of the documentation read the same data.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Iterator
from typing import Literal

LANES = 32
WARPS_PER_WARPGROUP = 4
REGISTERS_PER_SM = 65536
MAX_SHARED_BYTES = 227 * 1024  # of one CTA
NAMED_BARRIERS = 16  # of one CTA; number 0 is the one that all of its threads meet at
BARRIER_BYTES = 8
TENSOR_MEMORY_LANES = 128
TENSOR_MEMORY_COLUMNS = 512  # of 32 bits, in every lane
_SWIZZLED_ALIGNMENT = 1024
"""Operand tiles start at a multiple of this, as 128-byte swizzling requires."""

ElementType = Literal["operand", "f32", "i32"]
"""The storage type of the kernel's key, or a type of 32 bits."""


@dataclasses.dataclass(frozen=True)
class Role:
    """Warps of a CTA that do one job.

    Attributes:
      name: as in the kernel's text.
      first_warp: of the CTA.
      warps: of one group.
      groups: groups of warps that do the job side by side, such as two softmax warpgroups.
      registers: per thread, from setmaxnreg on; 0 leaves them as compiled.
      job: what it does, in a line.
    """

    name: str
    first_warp: int
    warps: int
    job: str
    groups: int = 1
    registers: int = 0

    @property
    def all_warps(self) -> range:
        """The indices of its warps in the CTA."""
        return range(self.first_warp, self.first_warp + self.groups * self.warps)


class Arrival(enum.Enum):
    """How a role's arrivals at an mbarrier count."""

    ONE = "one thread arrives"
    BYTES = "one thread arrives and announces the bytes that TMA then delivers"
    COMMIT = "the tensor core arrives when the products issued before are complete"
    GROUP = "one lane of every warp of one group arrives"
    WARPS = "one lane of every warp of all groups arrives"


@dataclasses.dataclass(frozen=True)
class Signal:
    """A role's share in completing the phases of an mbarrier."""

    role: str
    arrival: Arrival


def one(role: str) -> Signal:
    """One thread of a role arrives."""
    return Signal(role, Arrival.ONE)


def copied(role: str) -> Signal:
    """One thread of a role arrives and announces bytes that TMA delivers."""
    return Signal(role, Arrival.BYTES)


def committed(role: str) -> Signal:
    """The tensor core arrives for a role when the products issued before are complete."""
    return Signal(role, Arrival.COMMIT)


def group(role: str) -> Signal:
    """Every warp of one group of a role arrives."""
    return Signal(role, Arrival.GROUP)


def warps(role: str) -> Signal:
    """Every warp of all groups of a role arrives."""
    return Signal(role, Arrival.WARPS)


@dataclasses.dataclass(frozen=True)
class Barrier:
    """The mbarriers of one name.

    Attributes:
      signals: who completes a phase.
      waits: roles that wait for it.
      per: what a phase stands for.
      count: the number of such barriers, such as the stages of a ring.
      of_pair: the even CTA's barriers get the arrivals of both CTAs of a pair.
    """

    name: str
    signals: tuple[Signal, ...]
    waits: tuple[str, ...]
    per: str
    count: int = 1
    of_pair: bool = False


@dataclasses.dataclass(frozen=True)
class NamedBarrier:
    """The named barriers of one name: hardware barriers number `first` to `first + count - 1`.

    Attributes:
      threads: how many meet at each.
      roles: whose.
      meaning: what is known after it.
    """

    name: str
    first: int
    threads: int
    roles: tuple[str, ...]
    meaning: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Region:
    """A tensor in shared memory.

    Attributes:
      shape: of the tensor, in elements; () is a single value.
      element: its type.
      span_bytes: width of the swizzle of an operand tile, 0 for plain columns.
      alignment: in bytes.
      shares: name of the region whose memory this one views, or none.
      transposed: the first two axes are those of the region that it shares, exchanged.
      holds: what is in it.
    """

    name: str
    shape: tuple[int, ...]
    holds: str
    element: ElementType = "operand"
    span_bytes: int = 0
    alignment: int = 4
    shares: str = ""
    transposed: bool = False

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the tensor covers."""
        return math.prod(self.shape) * (2 if self.element == "operand" else 4)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of tensor memory, of all its lanes, that hold one matrix or several of a kind.

    Attributes:
      first: of the first matrix.
      width: of one, in columns of 32 bits.
      count: how many there are, such as two buffers.
      stride: from the first column of one to that of the next; 0 where they lie side by side.
      shares: name of the columns that these overlap, or none; the kernel's notes say why no value
        is lost.
      holds: what is in them.
    """

    name: str
    first: int
    width: int
    holds: str
    count: int = 1
    stride: int = 0
    shares: str = ""

    @property
    def step(self) -> int:
        """The distance from the first column of one to that of the next."""
        return self.stride or self.width

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first column of each."""
        return tuple(self.first + i * self.step for i in range(self.count))

    @property
    def end(self) -> int:
        """One past the last column."""
        return self.firsts[-1] + self.width


def operand(
    name: str,
    shape: tuple[int, ...],
    span_bytes: int,
    holds: str,
    shares: str = "",
    transposed: bool = False,
) -> Region:
    """Makes the region of an operand's swizzled tile, (rows, columns) or with stages last."""
    return Region(
        name,
        shape,
        holds,
        span_bytes=span_bytes,
        alignment=_SWIZZLED_ALIGNMENT,
        shares=shares,
        transposed=transposed,
    )


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor map of a [batch, length, heads, head_dim] buffer.

    Attributes:
      name: `q` is the parameter `q_map`.
      buffer: what it maps.
      rows, columns: of the tile in shared memory that one copy fills or stores.
      span_bytes: swizzle of that tile.
      store: the kernel stores by it.
    """

    name: str
    buffer: str
    rows: int
    columns: int
    span_bytes: int
    store: bool = False


@dataclasses.dataclass(frozen=True)
class Division:
    """How the work is divided among CTAs, and when they start.

    Attributes:
      rows: query rows of a tile: of a CTA's or a pair's in the forward, of dQ's in the backward.
      keys: of a CTA's or a pair's tile in the main backward kernel, and in Hopper's before it; 0 in
        the others.
      columns: of dQ's tile, in the main backward kernel and the one before it; 0 in the others.
      persistent: how many CTAs of a multiprocessor take tile after tile; 0 where each has one tile.
      by_ticket: a counter in global memory deals the tiles after a CTA's first.
      programmatic: the kernel may start while the launch before it ends.
      splits_tail: the last key tiles of a dense backward are split among CTAs.
      cleared_bytes: of Q, dO and dQ of the heads whose dQ Hopper's kernel before the main backward
        clears, while the main one clears the others (sm90/backward_clear.py); 0: it clears all.
      stores_first: where dQ is added in a fixed order, a query tile's first key tile stores it; so
        nobody clears it, and the kernel after the main one asks `dq_order` whether one has come.
    """

    rows: int
    keys: int = 0
    columns: int = 0
    persistent: int = 0
    by_ticket: bool = False
    programmatic: bool = False
    splits_tail: bool = False
    cleared_bytes: int = 0
    stores_first: bool = False


@dataclasses.dataclass(frozen=True)
class Description:
    """Roles, barriers, memory and tensor maps of one kernel; barriers lie before regions.

    Attributes:
      regions: of shared memory.
      division: of the work among CTAs.
      maps: its tensor maps, which are its first parameters.
      tensor_memory: its columns, on Blackwell.
      ctas: 1, or 2 for a pair, whose CTAs are alike but for `Barrier.of_pair`.
    """

    roles: tuple[Role, ...]
    barriers: tuple[Barrier, ...]
    named_barriers: tuple[NamedBarrier, ...]
    regions: tuple[Region, ...]
    division: Division
    maps: tuple[TensorMap, ...] = ()
    tensor_memory: tuple[Columns, ...] = ()
    ctas: int = 1

    def role(self, name: str) -> Role:
        """Returns the role of a name."""
        return self._roles[name]

    def barrier(self, name: str) -> Barrier:
        """Returns the mbarriers of a name."""
        return self._barriers[name]

    def named_barrier(self, name: str) -> NamedBarrier:
        """Returns the named barriers of a name."""
        (found,) = (barrier for barrier in self.named_barriers if barrier.name == name)
        return found

    def columns(self, name: str) -> Columns:
        """Returns the columns of tensor memory of a name."""
        (found,) = (columns for columns in self.tensor_memory if columns.name == name)
        return found

    @functools.cached_property
    def _roles(self) -> dict[str, Role]:
        return {role.name: role for role in self.roles}

    @functools.cached_property
    def _barriers(self) -> dict[str, Barrier]:
        return {barrier.name: barrier for barrier in self.barriers}

    @property
    def threads(self) -> int:
        """The number of threads of a CTA."""
        return LANES * (1 + max(role.all_warps[-1] for role in self.roles))

    def arrivals(self, barrier: Barrier, even_cta: bool = True) -> int:
        """Counts the arrivals that complete a phase, in a pair's even CTA or in its odd one."""
        number = 0
        for signal in barrier.signals:
            role = self.role(signal.role)
            each = {Arrival.GROUP: role.warps, Arrival.WARPS: role.warps * role.groups}
            number += each.get(signal.arrival, 1)
        return number * (self.ctas if barrier.of_pair and even_cta else 1)

    @property
    def barrier_count(self) -> int:
        """The number of mbarriers of a CTA."""
        return sum(barrier.count for barrier in self.barriers)

    def first_barriers(self) -> Iterator[tuple[Barrier, int]]:
        """Yields the barriers with the place of their first mbarrier among all of the CTA's."""
        first = 0
        for barrier in self.barriers:
            yield barrier, first
            first += barrier.count

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """The first byte of every region."""
        offsets, end = dict[str, int](), BARRIER_BYTES * self.barrier_count
        for region in self.regions:
            if region.shares:
                offsets[region.name] = offsets[region.shares]
                continue
            begin = -(-end // region.alignment) * region.alignment
            offsets[region.name], end = begin, begin + region.num_bytes
        return offsets

    @property
    def shared_bytes(self) -> int:
        """The number of bytes of shared memory of a CTA: whole multiples of the widest alignment,
        as the compiler pads them.
        """
        ends = [self.offsets[region.name] + region.num_bytes for region in self.regions]
        widest = max([BARRIER_BYTES, *(region.alignment for region in self.regions)])
        return -(-max([BARRIER_BYTES * self.barrier_count, *ends]) // widest) * widest
