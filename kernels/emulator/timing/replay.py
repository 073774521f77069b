"""A first estimate of how long recorded CTAs take on one SM: a replay against its resources.

The resources (`resources`) are an issue slot, execution units and a share of the tensor core in
each of four sub-partitions, one port of shared memory, bulk copies, and additions to global memory.
A warp issues in order and waits for its operands (`plans`). Barriers, copies and products complete
when what they wait for is done.

The tensor core of a sub-partition works on one product, and one more may queue; a warp that has a
third stands still, so that warps take turns. Operands of products come through the port of shared
memory, as do loads, stores and the writes of copies; copies wait until products leave the port idle
(on Blackwell their data arrive later by as much). Instruction fetch, power and other SMs are not
modelled, except that `rates` has the bandwidth of an SM when all SMs are busy. cp.async uses the
port of shared memory and takes as long as a load from L2. A program with groups of cp.async,
mma.sync or tcgen05.cp is refused.

The CTAs of a cluster have an SM each and run together. A product of a pair occupies both tensor
cores, each of which reads half of its operands. Bytes of a multicast reach every SM as if it had
asked for them alone. Transfers from SM to SM have a bandwidth and a latency (`rates`), and so have
arrivals; one that releases to the cluster begins with a memory barrier. A commit is the tensor
core's, not the warp's: it reaches both CTAs of a pair with the product's result. cta_group::2 loads
notify the other CTA's mbarrier at no extra cost.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter, defaultdict

from kernels.emulator.machine.barriers import TransactionBarrier
from kernels.emulator.machine.trace import (
    Arrived,
    Carried,
    Committed,
    Contribution,
    Copied,
    Event,
    Loaded,
    Met,
    Multiplied,
    Stored,
    Trace,
    Waited,
)
from kernels.emulator.ptx.entries import (
    Action,
    AwaitProducts,
    AwaitStores,
    AwaitTensorStores,
    CommitProducts,
    CommitStores,
    Gather,
    Multiply,
    Reduce,
)
from kernels.emulator.ptx.syntax import Register
from kernels.emulator.timing.plans import PARTITIONS, TENSOR_MEMORY, UNITS, Plan, make_plans
from kernels.emulator.timing.rates import Rates
from kernels.emulator.timing.resources import Interval, Record, Sm, row_of_warp


@dataclasses.dataclass(frozen=True)
class Timing:
    """An estimate.

    Attributes:
      cycles: from the start of the first recorded CTA to the end of the last.
      busy: cycles of work, by resource, as if it were spread evenly over the sub-partitions and,
        of clusters, over the SMs.
      waits: cycles that warps waited for barriers, copies and products, by warp index.
      intervals: the timeline.
      rates: what it rests on.
    """

    cycles: float
    busy: dict[str, float]
    waits: dict[int, float]
    intervals: tuple[Interval, ...]
    rates: Rates

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the time that each resource is at work."""
        return {name: busy / self.cycles for name, busy in self.busy.items()}


def estimate(trace: Trace, rates: Rates, resident_ctas: int = 1) -> Timing:
    """Replays a trace.

    Args:
      trace: the record of a launch. Its CTAs run on one SM, the next one when one has ended; those
        of a cluster run on one SM each, and every CTA of it must have been recorded.
      resident_ctas: how many fit on an SM at a time.

    Raises:
      NotImplementedError: the kernel uses what the model does not know.
      ValueError: the trace is empty, or holds a part of a cluster.
    """
    if trace.program is None or not trace.warps:
        raise ValueError("nothing was recorded: give the trace to launch")
    recorded = Counter(cluster for cluster, _ in trace.places.values())
    if set(recorded.values()) != {trace.cluster_size}:
        raise ValueError(f"{trace.cluster_size} CTAs of a cluster are to be recorded: {recorded}")
    return _Replay(trace, make_plans(trace.program, rates, trace.spread), rates).run(resident_ctas)


class _Warp:
    """A warp's place in its trace."""

    def __init__(self, cta: int, rank: int, sm: Sm, index: int, items: list[int | Event]):
        self.cta, self.rank, self.sm, self.index = cta, rank, sm, index
        self.partition = sm.partitions[index % PARTITIONS]
        self.items, self.position = items, 0
        self.plan: Plan | None = None
        self.op = 0
        self.ready: dict[Register, float] = {}
        self.products: list[float] = []
        self.product_groups: list[float] = []
        self.committed = self.copied = 0.0
        self.tensor_stores = 0.0
        self.stores: list[tuple[float, float]] = []
        self.store_groups: list[tuple[float, float]] = []
        self.since = 0.0
        self.eligible: float | None = None  # when the next instruction's operands were ready
        self.copies = True


@dataclasses.dataclass(frozen=True)
class _Waiter:
    """A warp that waits for a barrier since a time, and learns of its phase some cycles late."""

    warp: _Warp
    since: float
    latency: float
    why: str


class _Replay:
    """Runs the warps of an SM, or of a cluster's, through its resources, in the order of time."""

    def __init__(self, trace: Trace, plans: list[Plan], rates: Rates):
        self.trace, self.plans, self.rates = trace, plans, rates
        self.record = Record()
        labels = [f" of SM {number}" for number in range(trace.cluster_size)]
        labels = labels if len(labels) > 1 else [""]
        self.sms = [Sm(rates, self.record, label) for label in labels]
        self.waits: defaultdict[int, float] = defaultdict(float)
        # The time at which a warp goes on, since when it could have, and the order of the pushes.
        self.heap: list[tuple[float, float, int, _Warp]] = []
        self.order = itertools.count()
        self.missing: Counter[tuple[int, int]] = Counter()
        self.done: dict[tuple[int, int], float] = {}
        self.waiting: defaultdict[tuple[int, int], list[_Waiter]] = defaultdict(list)
        self.end = 0.0
        for warps in trace.warps.values():
            for item in itertools.chain.from_iterable(warps):
                if isinstance(item, Contribution):
                    self.missing[_key(item)] += 1
        self.meeting = dict(self.missing)

    def run(self, resident_ctas: int) -> Timing:
        """The estimate."""
        clusters: defaultdict[int, list[int]] = defaultdict(list)
        for cta in self.trace.warps:
            clusters[self.trace.places[cta][0]].append(cta)
        self.pending = list(clusters.values())
        self.left: dict[int, int] = {}
        for _ in range(min(resident_ctas, len(self.pending))):
            self._start(0.0)
        while self.heap:
            time, _, _, warp = heapq.heappop(self.heap)
            self._advance(warp, time)
        if stuck := [key for key, warps in self.waiting.items() if warps]:
            raise ValueError(f"{len(stuck)} barriers wait for what was not recorded")
        busy = {name: cycles / len(self.sms) for name, cycles in self.record.busy.items()}
        drained = max(self.end, *(sm.drained() for sm in self.sms)) * (1 + 1e-9)
        over = {name: cycles for name, cycles in busy.items() if cycles > drained}
        assert not over, f"at work for longer than the {drained:.0f} cycles that there are: {over}"
        return Timing(self.end, busy, dict(self.waits), tuple(self.record.intervals), self.rates)

    def _start(self, time: float) -> None:
        """The CTAs of the next cluster begin."""
        ctas = self.pending.pop(0)
        cluster, _ = self.trace.places[ctas[0]]
        self.left[cluster] = sum(len(self.trace.warps[cta]) for cta in ctas)
        for cta in ctas:
            _, rank = self.trace.places[cta]
            for index, items in enumerate(self.trace.warps[cta]):
                warp = _Warp(cta, rank, self.sms[rank], index, items)
                warp.since = time
                self._push(warp, time)

    def _push(self, warp: _Warp, time: float, since: float | None = None) -> None:
        since = time if since is None else since
        heapq.heappush(self.heap, (time, since, next(self.order), warp))

    def _advance(self, warp: _Warp, time: float) -> None:
        """Issues what a warp can, until it waits or another warp comes first."""
        while True:
            if warp.plan is not None:
                issued = self._issue(warp, time)
                if issued is None:
                    return
                time, action = issued, warp.plan.action
                if isinstance(action, Multiply) and warp.partition.room > time:
                    warp.op = len(warp.plan.ops)
                    self._push(warp, warp.partition.room)
                    return
                warp.plan = None
                if action is not None:
                    time = self._act(warp, time, action)
            if warp.position == len(warp.items):
                self._finish(warp, time)
                return
            item = warp.items[warp.position]
            warp.position += 1
            if isinstance(item, Event):
                after = self._event(warp, item, time)
                if after is None:
                    return
                time = after
            else:
                warp.plan, warp.op, warp.copies = self.plans[item], 0, True

    def _issue(self, warp: _Warp, time: float) -> float | None:
        """Issues the instructions of a plan; None if another warp may go first."""
        assert warp.plan is not None
        partition, sm, ready, heap = warp.partition, warp.sm, warp.ready, self.heap
        ops, busy = warp.plan.ops, self.record.busy
        for number in range(warp.op, len(ops)):
            op = ops[number]
            start = time
            for register in op.reads:
                start = max(start, ready.get(register, 0.0))
            end = start
            if op.cycles:
                start = max(start, partition.issue, partition.units[op.unit])
                if op.shared_bytes:  # no more is in flight than its latency covers
                    start = max(start, sm.shared - self.rates.shared_latency)
                # Among warps that want a unit, the one that has waited longest goes first.
                other = heap[0][0] if heap else math.inf
                tied = start == other > time and partition.units[op.unit] >= start
                if start > other or tied:
                    if warp.op != number or warp.eligible is None:
                        warp.op, warp.eligible = number, end
                    self._push(warp, start, warp.eligible)
                    return None
                warp.eligible = None
                partition.issue, partition.units[op.unit] = start + op.issue, start + op.cycles
                busy["issue"] += op.issue / PARTITIONS
                busy[UNITS[op.unit]] += op.cycles / PARTITIONS
                time, end = start + (op.latency if op.blocks else 1), start + op.latency
                if op.unit == TENSOR_MEMORY:
                    warp.tensor_stores = start + op.cycles
                if op.shared_bytes:
                    end += sm.share(start, op.shared_bytes)
            for register in op.writes:
                ready[register] = end
        return time

    def _finish(self, warp: _Warp, time: float) -> None:
        self._ran(warp, time)
        self.end = max(self.end, time)
        cluster, _ = self.trace.places[warp.cta]
        self.left[cluster] -= 1
        if not self.left[cluster] and self.pending:
            self._start(time + self.rates.cta_latency)

    def _ran(self, warp: _Warp, time: float) -> None:
        if time > warp.since:
            self.record.intervals.append(Interval(_row(warp), "runs", warp.since, time))

    def _slept(self, warp: _Warp, begin: float, end: float, why: str) -> float:
        """Notes that a warp waited; returns when it goes on."""
        if end <= begin:
            return begin
        self._ran(warp, begin)
        self.record.intervals.append(Interval(_row(warp), f"waits: {why}", begin, end))
        self.waits[warp.index] += end - begin
        warp.since = end
        return end

    def _event(self, warp: _Warp, event: Event, time: float) -> float | None:
        """Carries out an event; None if the warp has to wait for others."""
        rates = self.rates
        match event:
            case Contribution():
                if isinstance(event, Arrived) and event.releases_to_cluster:
                    time = self._slept(warp, time, time + rates.release_latency, "release")
                self._contribute(_key(event), self._contributes(warp, event, time))
                if isinstance(event, Met) and event.waits:
                    warps = self.meeting[_key(event)]
                    latency = rates.named_barrier_latency + rates.named_barrier_warp * warps
                    return self._await(_Waiter(warp, time, latency, "barrier"), _key(event))
            case Waited():
                since, barrier = time + rates.wait_latency, event.barrier
                named = isinstance(barrier, TransactionBarrier) and barrier.name
                waiter = _Waiter(warp, since, rates.barrier_latency, named or "barrier")
                return self._await(waiter, _key(event))
            case Stored() if warp.copies:
                warp.copies = False  # ptxas issues a copy once, however many lanes execute it
                end = warp.sm.copy("TMA store", time, event.size, rates.tma_store_bytes)
                warp.stores.append((end, end + rates.tma_store_latency))
            case Multiplied():
                warp.committed = self._tcgen05_product(warp, time, event)
            case _:
                pass
        return time

    def _contributes(self, warp: _Warp, event: Contribution, time: float) -> float:
        """The time at which an event counts for its barrier."""
        rates = self.rates
        match event:
            case Arrived():
                return time + self._remote(warp, event.rank)
            case Loaded():
                sm = self.sms[event.rank]
                end = sm.copy("TMA load", time, event.size, rates.tma_load_bytes)
                return end + rates.tma_latency
            case Carried():
                end = warp.sm.copy("SM to SM", time, event.size, rates.cluster_bytes)
                self.sms[event.rank].receive(event.size)
                return end + rates.cluster_latency
            case Committed():
                return max(time, warp.committed)
            case Copied():
                return max(time, warp.copied)
            case _:
                return time

    def _remote(self, warp: _Warp, rank: int) -> float:
        """The extra latency of an arrival on a barrier of the CTA of this rank."""
        return 0.0 if rank == warp.rank else self.rates.cluster_latency

    def _contribute(self, key: tuple[int, int], time: float) -> None:
        """One of the arrivals or copies that a phase waits for."""
        self.done[key] = max(self.done.get(key, 0.0), time)
        self.missing[key] -= 1
        if not self.missing[key]:
            for waiter in self.waiting.pop(key, ()):
                self._push(waiter.warp, self._passed(waiter, key))

    def _await(self, waiter: _Waiter, key: tuple[int, int]) -> float | None:
        """When a warp passes a barrier; None if that has to wait for others."""
        if self.missing[key]:
            self.waiting[key].append(waiter)
            return None
        return self._passed(waiter, key)

    def _passed(self, waiter: _Waiter, key: tuple[int, int]) -> float:
        end = self.done.get(key, 0.0) + waiter.latency
        return self._slept(waiter.warp, waiter.since, end, waiter.why)

    def _act(self, warp: _Warp, time: float, action: Action) -> float:
        """Does what a step asks for beyond its instruction; returns when the warp goes on."""
        match action:
            case Multiply():
                warp.products.append(warp.sm.multiply(warp.index, time, action))
            case CommitProducts():
                warp.product_groups.append(max(warp.products, default=time))
                warp.products = []
            case AwaitProducts():
                return self._await_products(warp, time, action.pending)
            case AwaitTensorStores():
                return max(time, warp.tensor_stores)
            case Reduce():
                # A warp waits only for what exceeds the additions that its latency covers.
                end = warp.sm.add(time, action.size) - self.rates.global_latency
                return self._slept(warp, time, end, "reduction")
            case Gather():
                # A load from L2, whose bytes the port of shared memory takes in as they come.
                delay = warp.sm.share(time, action.size)
                warp.copied = max(warp.copied, time + self.rates.global_latency + delay)
            case CommitStores():
                if warp.stores:
                    read, written = zip(*warp.stores, strict=True)
                    warp.store_groups.append((max(read), max(written)))
                warp.stores = []
            case AwaitStores():
                return self._await_stores(warp, time, action)
            case _:
                raise TypeError(action)
        return time

    def _tcgen05_product(self, warp: _Warp, time: float, event: Multiplied) -> float:
        """tcgen05.mma, on an SM's tensor core or a pair's; returns when its result is there."""
        rates, count = self.rates, event.ctas
        first = warp.rank // count * count
        sms = self.sms[first : first + count]
        begin = max(time, *(sm.tensor.free for sm in sms))
        flops = event.flops / rates.mma_flops
        port = event.size / rates.shared_bytes
        self.record.busy["tensor core"] += flops
        self.record.busy["shared"] += port
        end = begin
        for sm in sms:
            end = max(end, sm.tensor.multiply(begin, flops / count, port / count))
            sm.show("tensor core", f"warp {warp.index}", begin, sm.tensor.free)
        return end + rates.mma_latency + (rates.pair_latency if count > 1 else 0.0)

    def _await_products(self, warp: _Warp, time: float, pending: int) -> float:
        done = len(warp.product_groups) - pending
        if done <= 0:
            return time
        end = max(warp.product_groups[:done])
        del warp.product_groups[:done]
        return self._slept(warp, time, end, "product")

    def _await_stores(self, warp: _Warp, time: float, action: AwaitStores) -> float:
        done = len(warp.store_groups) - action.pending
        if done <= 0:
            return time
        end = max(group[action.written] for group in warp.store_groups[:done])
        if action.written:
            del warp.store_groups[:done]
        return self._slept(warp, time, end, "store")


def _key(event: Contribution | Waited) -> tuple[int, int]:
    """The phase of a barrier that an event is about."""
    return id(event.barrier), event.phase


def _row(warp: _Warp) -> str:
    return row_of_warp(warp.cta, warp.index)
