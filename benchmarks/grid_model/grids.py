"""Computes a grid's time from that of CTAs: which run where and when, and the memory they share.

A CTA is a list of steps (a key block of a forward tile, a query block of a backward one), each with
the cycles that it takes on a multiprocessor that has its operands, and with what it reads of global
memory, fetched some steps ahead. All CTAs share L2's bandwidth, its capacity (least recently used
goes first) and DRAM's bandwidth.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable

from benchmarks.grid_model.recording import Code
from kernels.emulator.timing.rates import Rates

_REGISTERS, _WARPS, _SHARED_BYTES, _MOST_CTAS = 65536, 64, 227 * 1024, 32
_RESERVED_SHARED_BYTES = 1024
_REGISTER_UNIT = 8
"""Source: CUDA C++ Programming Guide, technical specifications, compute capability 9.0."""


def resident_ctas(code: Code) -> int:
    """Returns how many CTAs of a kernel fit on a multiprocessor of compute capability 9.0."""
    warps = -(-code.launch.block[0] // 32)
    registers = -(-code.registers // _REGISTER_UNIT) * _REGISTER_UNIT * 32 * warps
    shared = code.launch.dynamic_smem_bytes + _RESERVED_SHARED_BYTES
    return min(_REGISTERS // registers, _WARPS // warps, _SHARED_BYTES // shared, _MOST_CTAS)


@dataclasses.dataclass(frozen=True)
class Access:
    """Bytes of global memory, with a name that identifies them."""

    name: Hashable
    size: int


@dataclasses.dataclass(frozen=True)
class Work:
    """One step of a CTA.

    Attributes:
      cycles: what it takes when all operands are available.
      reads: what is prefetched for it.
      writes: what it stores at its end; nothing waits for that.
      adds: what it reduces at its end.
      turn: its name in the order of additions.
      ordered_after: the name of the step after whose additions its own are ordered.
    """

    cycles: float
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    adds: tuple[Access, ...] = ()
    turn: Hashable = None
    ordered_after: Hashable = None


@dataclasses.dataclass(eq=False)
class _Cta:
    steps: list[Work]
    done: int = 0
    finishing: bool = False
    arrivals: deque[float] = dataclasses.field(default_factory=deque)


class Grid:
    """Runs the CTAs of a grid on all multiprocessors, in the order of time."""

    def __init__(self, rates: Rates, ahead: int):
        self.rates, self.ahead = rates, ahead
        self.l2: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        self.l2_size = self.dram_bytes = 0
        self.l2_free = self.dram_free = self.adds_free = 0.0
        self.turns: dict[Hashable, float] = {}
        self.waiting: defaultdict[Hashable, list[_Cta]] = defaultdict(list)
        self.heap: list[tuple[float, int, _Cta]] = []
        self.order = itertools.count()

    def run(self, ctas: Iterable[list[Work]]) -> float:
        """Returns the cycles until the last CTA ends; each starts, in order, where one ended."""
        pending = iter(ctas)
        for steps in itertools.islice(pending, self.rates.multiprocessors):
            self._start(steps, 0.0)
        end = 0.0
        while self.heap:
            time, _, cta = heapq.heappop(self.heap)
            if cta.finishing:
                self._finish(cta, time)
                continue
            if cta.done < len(cta.steps):
                self._begin(cta, time)
                continue
            end = max(end, time)
            if (steps := next(pending, None)) is not None:
                self._start(steps, time + self.rates.cta_latency)
        if any(self.waiting.values()):
            raise ValueError("CTAs wait for turns that never come")
        return end

    def _start(self, steps: list[Work], time: float) -> None:
        cta = _Cta(steps)
        for step in steps[: self.ahead]:
            cta.arrivals.append(self._fetch(step, time))
        self._push(cta, time)

    def _fetch(self, step: Work, time: float) -> float:
        """Returns when a step's operands are available, without the latency of L2, which `cycles`
        includes.
        """
        return max((self._read(access, time) for access in step.reads), default=time)

    def _read(self, access: Access, time: float) -> float:
        rates = self.rates
        self.l2_free = max(self.l2_free, time) + access.size / self._all(rates.tma_load_bytes)
        return max(self.l2_free, self._touch(access, time))

    def _touch(self, access: Access, time: float, known: bool = True) -> float:
        """Returns when L2 has the bytes; `known` if their old values are needed."""
        if access.name in self.l2:
            self.l2.move_to_end(access.name)
            return self.l2[access.name][1]
        there = time
        if known:
            self._dram(access.size, time)
            there = self.dram_free + self.rates.dram_latency
        self.l2[access.name] = access.size, there
        self.l2_size += access.size
        while self.l2_size > self.rates.l2_bytes:
            self.l2_size -= self.l2.popitem(last=False)[1][0]
        return there

    def _dram(self, size: int, time: float) -> None:
        self.dram_bytes += size
        self.dram_free = max(self.dram_free, time) + size / self._all(self.rates.dram_bytes)

    def _all(self, bytes_of_one: float) -> float:
        return bytes_of_one * self.rates.multiprocessors

    def _begin(self, cta: _Cta, time: float) -> None:
        """Starts a step; its operands may not be available yet."""
        if cta.done and cta.done - 1 + self.ahead < len(cta.steps):
            cta.arrivals.append(self._fetch(cta.steps[cta.done - 1 + self.ahead], time))
        step = cta.steps[cta.done]
        cta.finishing = True
        self._push(cta, max(time, cta.arrivals.popleft()) + step.cycles - self._adding(step))

    def _finish(self, cta: _Cta, time: float) -> None:
        """Ends a step: performs its additions, once it is its turn, and its stores."""
        step, rates = cta.steps[cta.done], self.rates
        if step.ordered_after is not None:
            if step.ordered_after not in self.turns:
                self.waiting[step.ordered_after].append(cta)
                return
            turn = self.turns[step.ordered_after] + rates.signal_latency
            if turn > time:
                self._push(cta, turn)
                return
        end = time + self._adding(step)
        for access in step.adds:
            self.adds_free = max(self.adds_free, time) + access.size / self._all(rates.reduce_bytes)
            if access.name not in self.l2:
                self._dram(access.size, time)  # L2 writes back what it evicts for it.
            self._touch(access, time)
            end = max(end, self.adds_free)
        for access in step.writes:
            self._touch(access, time, known=False)
            self._dram(access.size, time)
        if step.turn is not None:
            # Two mbarriers from the warp that polls to those that add and back, and the release
            # waits until L2 has the additions.
            over = end + 2 * rates.barrier_latency + rates.global_latency
            self.turns[step.turn] = over
            for other in self.waiting.pop(step.turn, ()):
                self._push(other, over)
        cta.done += 1
        cta.finishing = False
        self._push(cta, end)

    def _adding(self, step: Work) -> float:
        return sum(access.size for access in step.adds) / self.rates.reduce_alone

    def _push(self, cta: _Cta, time: float) -> None:
        heapq.heappush(self.heap, (time, next(self.order), cta))


def to_and_fro(tiles: list[list[Work]], ctas: int) -> list[list[Work]]:
    """Returns the steps of each CTA of a persistent grid: tiles in rounds, every other one in
    reverse.
    """
    hands: list[list[Work]] = [[] for _ in range(ctas)]
    for index, steps in enumerate(tiles):
        turn, place = divmod(index, ctas)
        hands[place if turn % 2 == 0 else ctas - 1 - place] += steps
    return hands


def by_tile(heads: int, tiles: int, section: int) -> list[tuple[int, int]]:
    """Lists (tile, head) in the order of the kernels' `nth_tile`: within sections of heads, by
    tile.
    """
    order = []
    for first in range(0, heads, section):
        here = range(first, min(first + section, heads))
        order += [(tile, head) for tile in range(tiles) for head in here]
    return order
