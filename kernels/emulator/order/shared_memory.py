"""Happens-before of a cluster's accesses to shared memory, thread by thread; see `clocks`.

The CTAs of a cluster share their clocks; each has a shadow of its own shared memory.
"""

from __future__ import annotations

import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.order.clocks import PENDING, Clocks, rows_of
from kernels.emulator.order.readers import Readers
from kernels.emulator.ptx.program import LANES

_FINE, _COARSE = 2, 16  # bytes per shadow entry of threads' and of asynchronous accesses


class SharedOrder:
    """The shadow of one CTA's shared memory, which starts at address `base`."""

    def __init__(self, clocks: Clocks, rank: int, shared_bytes: int, base: int = 0):
        self.clocks, self.rank, self.base = clocks, rank, base
        self.threads, per_cta = clocks.threads, clocks.threads_per_cta
        self.own_threads = range(rank * per_cta, (rank + 1) * per_cta)
        self.own = slice(rank * per_cta, (rank + 1) * per_cta)
        self.clock, self.fenced, self.now = clocks.clock, clocks.fenced[rank], clocks.now
        self.visits: np.ndarray | None = None
        fine, coarse = -(-shared_bytes // _FINE), -(-shared_bytes // _COARSE)
        fine = coarse * (_COARSE // _FINE)
        self._writer, self._written = np.zeros(fine, np.int16), np.zeros(fine, np.int32)
        self._readers = Readers(fine)
        self._atomic: np.ndarray | None = None
        self._touched = np.zeros(coarse, bool)
        self._async_writer = np.zeros(coarse, np.int16)
        self._async_written = np.zeros(coarse, np.int32)
        self._async_read: dict[int, np.ndarray] = {}
        self._pipe_read: dict[int, np.ndarray] = {}
        self._sizes = fine, coarse

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

    def knows(self, thread: int, moment: int) -> bool:
        """Whether any of the CTA's threads knows a moment of a thread."""
        return bool(self.clock[self.own, thread].max() >= moment)

    def unknown_visitor(self) -> int | None:
        """A thread whose access none of the CTA's own threads knows of, if there is one."""
        if self.visits is None:
            return None
        late = self.visits > self.clock[self.own, : self.threads].max(0)
        return int(np.argmax(late)) if late.any() else None

    def seen(self, slot: int, phase: int) -> bool:
        """Whether any of the CTA's threads has seen a barrier complete this many phases."""
        return bool(self.clock[self.own, slot].max() >= phase)

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
        known = self.clock[rows_of(threads)]
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
        """An asynchronous operation writes these chunks, and completes with a barrier's phase."""
        threads = np.array([thread])
        self._check_async_operands(threads, coarse, "writes")
        fine = self._fine_of(coarse)
        self._check_reads(self.clock[threads], fine.reshape(1, -1), coarse.reshape(1, -1))
        self._written[fine] = 0
        self._touched[coarse] = False
        self._async_writer[coarse] = slot
        self._async_written[coarse] = phase

    def _check_async_operands(self, threads: np.ndarray, coarse: np.ndarray, verb: str) -> None:
        rows = rows_of(threads)
        known = self.clock[rows].min(0)
        late = self._async_written[coarse] > known[self._async_writer[coarse]]
        if late.any():
            at = self.base + int(coarse[late][0]) * _COARSE
            raise Fault(
                "race",
                f"an asynchronous operation {verb} shared address {at:#x} without waiting for the "
                "asynchronous copy that writes it",
            )
        touched = coarse[self._touched[coarse]]
        if not touched.size:
            return
        fine = self._fine_of(touched)
        writers, written = self._writer[fine], self._written[fine]
        late = written > known[writers]
        if late.any():
            at = int(fine[late][0])
            raise Fault(
                "race",
                f"an asynchronous operation {verb} what thread {self._writer[at]} wrote at shared "
                f"address {self.base + at * _FINE:#x}, and nothing orders the two",
            )
        unfenced = written > self.fenced[rows].min(0)[writers]
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
                raise Fault(
                    "race",
                    f"writes shared address {at:#x}, which an asynchronous operation of warp "
                    f"{warp} may still read",
                )
        for column, plane in self._pipe_read.items():
            # A slot's clock starts below zero, which is the number of no operation.
            late = plane[coarse] > np.maximum(known[:, column], 0)[:, None]
            if late.any():
                at = int(coarse[late][0]) * _COARSE
                raise Fault(
                    "race",
                    f"writes shared address {at:#x}, which a tcgen05 operation may still read",
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
