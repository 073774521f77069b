"""Happens-before of a cluster's accesses to shared memory, thread by thread; see `clocks`.

The CTAs of a cluster share their clocks; each has a shadow of its own shared memory.
"""

from __future__ import annotations

import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.order.clocks import PENDING, Clocks, Knowledge
from kernels.emulator.order.readers import Readers
from kernels.emulator.ptx.program import LANES

_FINE, _COARSE = 2, 16  # bytes per shadow entry of threads' and of asynchronous accesses


class Order:
    """Clocks of a cluster and the shadow of one CTA's shared memory, which starts at `base`."""

    def __init__(self, clocks: Clocks, rank: int, shared_bytes: int, base: int = 0):
        self.clocks, self.rank, self.base = clocks, rank, base
        self.threads, per_cta = clocks.threads, clocks.threads_per_cta
        self.own_threads = range(rank * per_cta, (rank + 1) * per_cta)
        self.own = slice(rank * per_cta, (rank + 1) * per_cta)
        self.clock, self.fenced, self.now = clocks.clock, clocks.fenced[rank], clocks.now
        self.fenced_global = clocks.fenced_global
        self.visits: np.ndarray | None = None
        fine, coarse = -(-shared_bytes // _FINE), -(-shared_bytes // _COARSE)
        fine = coarse * (_COARSE // _FINE)
        self._writer, self._written = np.zeros(fine, np.int16), np.zeros(fine, np.int32)
        self._events = clocks.events
        self._readers = Readers(fine)
        self._atomic: np.ndarray | None = None
        self._touched = np.zeros(coarse, bool)
        self._async_writer = np.zeros(coarse, np.int16)
        self._async_written = np.zeros(coarse, np.int32)
        self._async_read: dict[int, np.ndarray] = {}
        self._pipe_read: dict[int, np.ndarray] = {}
        self._sizes = fine, coarse

    def new_slot(self) -> int:
        """An agent for a barrier."""
        return self.clocks.new_slot()

    def release(self, threads: np.ndarray) -> Knowledge:
        """What these threads know now; their warps' next moments begin."""
        events = 0
        for thread in threads.tolist() if self._events else ():
            events |= self._events.get(thread, 0)
        given = Knowledge(self.clock[threads].max(0), self.clocks.fenced[:, threads].max(1), events)
        self.clocks.advance(threads)
        return given

    def relaxed_release(self, threads: np.ndarray) -> Knowledge | None:
        """What a relaxed operation of these threads carries: what fences before it released."""
        if self.clocks.published is None:
            return None
        published = self.clocks.published[threads].max(0)
        fenced = self.clocks.fenced[:, threads].max(1)
        return Knowledge(published, np.minimum(fenced, published))

    def publish(self, threads: np.ndarray, only_barriers: bool = False) -> None:
        """A releasing fence: later relaxed operations of these threads carry what they know now.

        `only_barriers` is fence.mbarrier_init, which releases initialisations alone.
        """
        clocks = self.clocks
        if clocks.published is None:
            clocks.published = np.zeros_like(self.clock)
            clocks.published[:, clocks.first_slot :] = -1
        if only_barriers:
            rows = np.minimum(self.clock[threads, clocks.first_slot :], 0)
            own = clocks.published[threads, clocks.first_slot :]
            clocks.published[threads, clocks.first_slot :] = np.maximum(own, rows)
        else:
            clocks.published[threads] = self.clock[threads]
            clocks.fences = True
            self.clocks.advance(threads)

    def acquire_later(
        self, threads: np.ndarray, slot: int, phase: int, given: Knowledge | None
    ) -> None:
        """A relaxed wait has seen a phase: a fence behind it will acquire what that hands over."""
        clock = np.zeros(self.clock.shape[1], np.int32)
        clock[slot] = phase
        given = Knowledge(clock, np.zeros_like(self.clocks.fenced[:, 0])).merged(given)
        for thread in threads.tolist():
            self.clocks.later[thread] = given.merged(self.clocks.later.get(thread))

    def fence(self, threads: np.ndarray) -> None:
        """fence.acq_rel: acquires what relaxed waits have seen, releases for relaxed arrivals."""
        for thread in threads.tolist() if self.clocks.later else ():
            given = self.clocks.later.pop(thread, None)
            if given is not None:
                self.acquire(np.array([thread]), given)
        self.publish(threads)

    def visit(self, threads: np.ndarray) -> None:
        """Threads of another CTA access this one's memory: it must have started, and not end."""
        self.check_started(threads)
        if self.visits is None:
            self.visits = np.zeros(self.threads, np.int32)
        self.visits[threads] = self.now[threads // LANES]

    def check_started(self, threads: np.ndarray) -> None:
        """Faults unless these threads know that the CTA runs."""
        if not self.clock[threads, self.threads + self.rank].all():
            lane = int(threads[np.argmin(self.clock[threads, self.threads + self.rank])]) % LANES
            message = f"nothing says that CTA {self.rank} of the cluster has started"
            raise Fault("cluster-start", message, lane)

    def started(self, threads: np.ndarray) -> None:
        """These threads know that every CTA of the cluster runs."""
        self.clock[threads, self.threads : self.clocks.first_slot] = 1

    def knows(self, thread: int, moment: int) -> bool:
        """Whether any of the CTA's threads knows a moment of a thread."""
        return bool(self.clock[self.own, thread].max() >= moment)

    def unknown_visitor(self) -> int | None:
        """A thread whose access none of the CTA's own threads knows of, if there is one."""
        if self.visits is None:
            return None
        late = self.visits > self.clock[self.own, : self.threads].max(0)
        return int(np.argmax(late)) if late.any() else None

    def acquire(self, threads: np.ndarray, given: Knowledge) -> None:
        """These threads learn what others handed over."""
        self.clock[threads] = np.maximum(self.clock[threads], given.clock)
        every = self.clocks.fenced
        every[:, threads] = np.maximum(every[:, threads], given.fenced[:, None])
        for thread in threads.tolist() if given.events else ():
            self.learn(thread, given.events)

    def learn(self, thread: int, events: int) -> None:
        """A thread learns of events."""
        self._events[thread] = self._events.get(thread, 0) | events

    def events_of(self, thread: int) -> int:
        """The events that a thread knows of."""
        return self._events.get(thread, 0)

    def see_phase(self, threads: np.ndarray, slot: int, phase: int) -> None:
        """These threads have seen a barrier complete this many phases."""
        self.clock[threads, slot] = np.maximum(self.clock[threads, slot], phase)

    def seen(self, slot: int, phase: int) -> bool:
        """Whether any of the CTA's threads has seen a barrier complete this many phases."""
        return bool(self.clock[self.own, slot].max() >= phase)

    def fence_proxy(self, threads: np.ndarray, space: str = "") -> None:
        """fence.proxy.async, of one state space or of all.

        It counts for what its own thread wrote: PTX has no rule for a fence of another thread that
        knows of the store. What no thread wrote, but a barrier's phase completes, any may fence.
        The next moments of the threads' warps begin, so that later stores do not count as fenced.
        """
        clocks, slots = self.clocks, slice(self.clocks.first_slot, None)
        concerned = [self.fenced_global] if space in ("", "global") else []
        if space == "shared:cta":
            concerned.append(self.fenced)
        elif space != "global":
            concerned.extend(clocks.fenced_shared)
        for fenced in concerned:
            fenced[threads, threads] = self.clock[threads, threads]
            fenced[threads, slots] = self.clock[threads, slots]
        clocks.advance(threads)

    def release_maps(self, threads: np.ndarray) -> None:
        """fence.proxy.tensormap::generic.release: passes on what threads wrote into tensor maps."""
        assert self.clocks.fenced_maps is not None
        self.clocks.fenced_maps[threads] = self.clock[threads]
        self.clocks.advance(threads)

    def acquire_maps(self, threads: np.ndarray, addresses: np.ndarray) -> None:
        """fence.proxy.tensormap::generic.acquire of the map at each thread's address."""
        assert self.clocks.fenced_maps is not None
        for thread, address in zip(threads.tolist(), addresses.tolist(), strict=True):
            self.clocks.acquired_maps[thread, address] = self.clocks.fenced_maps[thread].copy()

    def thread_reads(self, threads: np.ndarray, addresses: np.ndarray, size: int) -> None:
        """Loads of `size` bytes at each address by these threads."""
        fine, coarse = self._entries(addresses, size)
        self._check_written(self.clock, threads, fine, coarse, "reads")
        warp = int(threads[0]) // LANES
        self._readers.record(self.clock, threads, fine, int(self.now[warp]))
        self._touched[coarse] = True

    def thread_writes(self, threads: np.ndarray, addresses: np.ndarray, size: int) -> None:
        """Stores of `size` bytes at each address by these threads."""
        fine, coarse = self._entries(addresses, size)
        self._check_written(self.clock, threads, fine, coarse, "writes")
        known = self.clock[threads]
        self._check_reads(known, fine, coarse)
        self._record_writes(threads, fine, coarse)
        if self._atomic is not None:
            self._atomic[fine] = False

    def _record_writes(self, threads: np.ndarray, fine: np.ndarray, coarse: np.ndarray) -> None:
        self._writer[fine] = threads[:, None]
        self._written[fine] = self.now[int(threads[0]) // LANES]
        self._touched[coarse] = True

    def thread_updates(
        self, threads: np.ndarray, addresses: np.ndarray, size: int, polls: bool = False
    ) -> None:
        """Atomic updates, or with `polls` atomic loads: they race with plain accesses alone."""
        if self._atomic is None:
            self._atomic = np.zeros(self._sizes[0], bool)
        fine, coarse = self._entries(addresses, size)
        rows = threads[:, None]
        late = (self._written[fine] > self.clock[rows, self._writer[fine]]) & ~self._atomic[fine]
        late |= np.repeat(
            self._async_written[coarse] > self.clock[rows, self._async_writer[coarse]],
            -(-fine.shape[1] // coarse.shape[1]),
            1,
        )[:, : fine.shape[1]]
        if late.any():
            self._check_written(self.clock, threads, fine, coarse, "updates")
        if polls:
            return
        self._check_reads(self.clock[threads], fine, coarse)
        self._record_writes(threads, fine, coarse)
        self._atomic[fine] = True

    def slot_writes(
        self,
        threads: np.ndarray,
        addresses: np.ndarray,
        size: int,
        phase: tuple[int, int],
        atomic: bool,
    ) -> None:
        """Writes that are over in a phase of a barrier, given by its slot."""
        if atomic:
            self.thread_updates(threads, addresses, size)
        else:
            self.thread_writes(threads, addresses, size)
        fine = self._entries(addresses, size)[0]
        self._writer[fine], self._written[fine] = phase

    def copy_writes(self, threads: np.ndarray, addresses: np.ndarray, size: int) -> None:
        """Writes by cp.async, which even the issuing threads must wait for."""
        self.thread_writes(threads, addresses, size)
        self._written[self._entries(addresses, size)[0]] = PENDING

    def copies_done(
        self, threads: np.ndarray, addresses: np.ndarray, phase: tuple[int, int] | None = None
    ) -> None:
        """These threads' cp.async to those addresses, of 4 to 16 bytes each, have been waited for.

        Or they will be over in a phase of a barrier, given by its slot.
        """
        fine = self._entries(addresses, _COARSE)[0]
        fine = fine[(fine < self._sizes[0]).all(1)]
        mine = (self._written[fine] == PENDING) & np.isin(self._writer[fine], threads)
        if phase is None:
            self._written[fine[mine]] = self.now[int(threads[0]) // LANES]
        else:
            self._writer[fine[mine]], self._written[fine[mine]] = phase

    def async_reads(self, threads: np.ndarray, coarse: np.ndarray) -> None:
        """An asynchronous operation that these threads of one warp issue reads these chunks."""
        self._check_async_operands(threads, coarse, "reads")
        self._plane(self._async_read, int(threads[0]) // LANES, 1)[coarse] = PENDING

    def pipe_reads(self, thread: int, coarse: np.ndarray, column: int, number: int) -> None:
        """Operation `number` of a thread's tcgen05 pipe reads these chunks."""
        self._check_async_operands(np.array([thread]), coarse, "reads")
        self._plane(self._pipe_read, column, 1)[coarse] = number

    def async_read_done(self, warp: int, coarse: np.ndarray) -> None:
        """A warp has waited for its asynchronous operation."""
        self._plane(self._async_read, warp, 1)[coarse] = self.now[warp]

    def async_read_again(self, warp: int, coarse: np.ndarray) -> None:
        """Another asynchronous operation of the warp, not yet waited for, reads these chunks."""
        self._plane(self._async_read, warp, 1)[coarse] = PENDING

    def async_writes(self, thread: int, coarse: np.ndarray, slot: int, phase: int) -> None:
        """An asynchronous operation writes these chunks; a barrier's phase tells when it has."""
        threads = np.array([thread])
        self._check_async_operands(threads, coarse, "writes")
        fine = self._fine_of(coarse)
        self._check_reads(self.clock[threads], fine.reshape(1, -1), coarse.reshape(1, -1))
        self._written[fine] = 0
        self._touched[coarse] = False
        self._async_writer[coarse] = slot
        self._async_written[coarse] = phase

    def _check_async_operands(self, threads: np.ndarray, coarse: np.ndarray, verb: str) -> None:
        known = self.clock[threads].min(0)
        late = self._async_written[coarse] > known[self._async_writer[coarse]]
        if late.any():
            self._fail_async(coarse, late, verb)
        touched = coarse[self._touched[coarse]]
        if not touched.size:
            return
        fine = self._fine_of(touched)
        writers, written = self._writer[fine], self._written[fine]
        late = written > known[writers]
        if late.any():
            self._fail_fine(fine, late, f"an asynchronous operation {verb} what", "wrote")
        unfenced = written > self.fenced[threads].min(0)[writers]
        if unfenced.any():
            at = int(fine[unfenced][0])
            raise Fault(
                "proxy-fence",
                f"an asynchronous operation {verb} shared address {self.base + at * _FINE:#x}, "
                f"which thread {self._writer[at]} wrote, without a fence.proxy.async in between",
                int(threads[0]) % LANES if len(threads) == 1 else None,
            )

    def _check_written(
        self,
        clock: np.ndarray,
        threads: np.ndarray,
        fine: np.ndarray,
        coarse: np.ndarray,
        verb: str,
    ) -> None:
        rows = threads[:, None]
        late = self._written[fine] > clock[rows, self._writer[fine]]
        if late.any():
            at = np.argwhere(late)[0]
            entry = int(fine[tuple(at)])
            raise Fault(
                "race",
                f"{verb} shared address {self.base + entry * _FINE:#x}, which thread "
                f"{self._writer[entry]} wrote, and nothing orders the two",
                int(threads[at[0]]) % LANES,
            )
        late = self._async_written[coarse] > clock[rows, self._async_writer[coarse]]
        if late.any():
            at = np.argwhere(late)[0]
            address = self.base + int(coarse[tuple(at)]) * _COARSE
            raise Fault(
                "race",
                f"{verb} shared address {address:#x} without waiting for the asynchronous copy "
                "that writes it",
                int(threads[at[0]]) % LANES,
            )

    def _check_reads(self, known: np.ndarray, fine: np.ndarray, coarse: np.ndarray) -> None:
        """Faults unless everything that read these entries is known."""
        reader = self._readers.unknown(known, fine)
        if reader is not None:
            entry, thread = reader
            raise Fault(
                "race",
                f"writes shared address {self.base + entry * _FINE:#x}, which thread {thread} "
                "reads, and nothing orders the two",
            )
        for warp, plane in self._async_read.items():
            most = known[:, warp * LANES : (warp + 1) * LANES].max(1)
            late = plane[coarse] > most[:, None]
            if late.any():
                at = self.base + int(coarse[late][0]) * _COARSE
                self._fail_reading(at, warp, "an asynchronous operation")
        for column, plane in self._pipe_read.items():
            # A slot's clock starts below zero, which is the number of no operation.
            late = plane[coarse] > np.maximum(known[:, column], 0)[:, None]
            if late.any():
                at = int(coarse[late][0]) * _COARSE
                raise Fault(
                    "race",
                    f"writes shared address {at:#x}, which a tcgen05 operation may still read",
                )

    def _fail_reading(self, address: int, warp: int, what: str) -> None:
        raise Fault(
            "race",
            f"writes shared address {address:#x}, which {what} of warp {warp} may still read",
        )

    def _fail_fine(
        self,
        fine: np.ndarray,
        late: np.ndarray,
        what: str,
        did: str,
        agents: np.ndarray | None = None,
    ) -> None:
        at = int(fine[late][0])
        agent = (self._writer if agents is None else agents)[at]
        raise Fault(
            "race",
            f"{what} thread {agent} {did} at shared address {self.base + at * _FINE:#x}, "
            "and nothing orders the two",
        )

    def _fail_async(self, coarse: np.ndarray, late: np.ndarray, verb: str) -> None:
        at = self.base + int(coarse[late][0]) * _COARSE
        raise Fault(
            "race",
            f"an asynchronous operation {verb} shared address {at:#x} without waiting for the "
            "asynchronous copy that writes it",
        )

    def _entries(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        fine = (addresses[:, None] - self.base) // _FINE + np.arange(max(size // _FINE, 1))
        return fine, fine[:, :: _COARSE // _FINE] // (_COARSE // _FINE)

    def _fine_of(self, coarse: np.ndarray) -> np.ndarray:
        per = _COARSE // _FINE
        return (coarse.reshape(-1)[:, None] * per + np.arange(per)).reshape(-1)

    def _plane(self, planes: dict[int, np.ndarray], warp: int, coarse: int) -> np.ndarray:
        if warp not in planes:
            planes[warp] = np.zeros(self._sizes[coarse], np.int32)
        return planes[warp]
