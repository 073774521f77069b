"""Happens-before of accesses to tensor memory.

Two kinds of agents touch it: threads, whose tcgen05.ld and st are complete when they have waited,
and pipes, one per thread that issues products and copies, whose operations are complete when a
commit's mbarrier says so. What a thread knows of them lies in columns of its clock after the
mbarriers': one per pipe, and one per thread for what a tcgen05.fence::before_thread_sync passed on.
Knowledge that came with a barrier counts for a thread's own tcgen05 operations only after its
tcgen05.fence::after_thread_sync: `seen` is that part.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.order.clocks import PENDING, PIPE_SLOTS, Clocks
from kernels.emulator.ptx.program import LANES

TENSOR_LANES, TENSOR_COLUMNS = 128, 512
COPIED, SHIFTED = -1, -2
"""Forms of what tcgen05.cp and tcgen05.shift wrote; those of products are positive."""


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """Cells of tensor memory, 32 bits each."""

    lane: int
    column: int
    lanes: int
    columns: int

    @property
    def cells(self) -> tuple[slice, slice]:
        """Index of the cells in a (128, 512) array."""
        return (
            slice(self.lane, self.lane + self.lanes),
            slice(self.column, self.column + self.columns),
        )

    def __str__(self) -> str:
        return (
            f"lanes {self.lane}-{self.lane + self.lanes - 1}, "
            f"columns {self.column}-{self.column + self.columns - 1}"
        )


class TensorClocks:
    """What the threads of a cluster know of tcgen05 operations; see the module's text."""

    def __init__(self, clocks: Clocks, needs_fences: bool):
        self.order, self.threads, self.needs_fences = clocks, clocks.threads, needs_fences
        self.pipes: dict[int, int] = {}
        everyone = np.arange(self.threads)
        self.issued = np.zeros(PIPE_SLOTS, np.int32)
        # Threads, pipes that are done, pipes that have issued.
        self.seen = np.zeros((self.threads, self.threads + 2 * PIPE_SLOTS), np.int32)
        same_warp = everyone[:, None] // LANES == everyone // LANES
        # A thread's own operations are in order once it has waited for them.
        self.seen[:, : self.threads][same_warp] = PENDING - 1
        first = clocks.first_pipe
        self._of_pipes = slice(first, first + 2 * PIPE_SLOTS)
        self._of_threads = slice(self._of_pipes.stop, self._of_pipes.stop + self.threads)
        self._columns = np.concatenate([everyone, np.arange(first, first + 2 * PIPE_SLOTS)])

    def new_pipe(self, thread: int) -> int:
        """The agent of a thread that issues products."""
        if thread not in self.pipes:
            if len(self.pipes) == PIPE_SLOTS:
                raise Fault("not implemented", f"more than {PIPE_SLOTS} threads issue tcgen05.mma")
            self.pipes[thread] = self.threads + len(self.pipes)
        return self.pipes[thread]

    def column(self, agent: int) -> int:
        """The column of `order.clock` that says what is ordered before a thread, without fences."""
        return int(self._columns[agent])

    def fence_before(self, threads: np.ndarray) -> None:
        """tcgen05.fence::before_thread_sync; relaxed operations carry what it passes on, too."""
        order, column = self.order, self._of_threads.start
        order.clock[threads, column + threads] = order.now[threads // LANES]
        for thread in threads.tolist():
            if thread in self.pipes:
                pipe = self.pipes[thread] - self.threads
                order.clock[thread, self._of_pipes.start + PIPE_SLOTS + pipe] = self.issued[pipe]
        if order.published is None:
            order.published = np.zeros_like(order.clock)
            order.published[:, order.first_slot :] = -1
        first = order.first_pipe
        order.published[threads, first:] = order.clock[threads, first:]
        order.advance(threads)

    def fence_after(self, threads: np.ndarray) -> None:
        """tcgen05.fence::after_thread_sync; it also acquires what relaxed waits have seen."""
        order, first = self.order, self.order.first_pipe
        for thread in threads.tolist() if order.later else ():
            if thread in order.later:
                given = order.later[thread].clock[first:]
                order.clock[thread, first:] = np.maximum(order.clock[thread, first:], given)
        known = self.order.clock[threads]
        passed = np.concatenate([known[:, self._of_threads], known[:, self._of_pipes]], 1)
        self.seen[threads] = np.maximum(self.seen[threads], passed)

    def known(self, threads: np.ndarray | int, agents: np.ndarray | slice | int) -> np.ndarray:
        """The last moments of agents after which threads' tcgen05 operations come."""
        seen = self.seen[threads, agents]
        if self.needs_fences:
            return seen
        return np.maximum(seen, self.plain(threads, agents))

    def plain(self, threads: np.ndarray | int, agents: np.ndarray | slice | int) -> np.ndarray:
        """The same by barriers alone, as if no fences were needed."""
        return np.maximum(self.order.clock[threads, self._columns[agents]], 0)


class TensorShadow:
    """The last reads and writes of the tensor memory of one CTA."""

    def __init__(self, clocks: TensorClocks):
        self.clocks = clocks
        shape = (TENSOR_LANES, TENSOR_COLUMNS)
        self._writer, self._written = np.zeros(shape, np.int16), np.zeros(shape, np.int32)
        self._form = np.zeros(shape, np.int32)
        self._reads: dict[int, np.ndarray] = {}
        self._pipe_reads: dict[int, np.ndarray] = {}

    def clear(self, rectangle: Rectangle) -> None:
        """Columns are allocated or freed: nobody has touched them."""
        for plane in (self._written, *self._reads.values(), *self._pipe_reads.values()):
            plane[rectangle.cells] = 0

    def thread_reads(self, threads: np.ndarray, rectangle: Rectangle) -> None:
        """tcgen05.ld of a warp; `threads` is broadcast against the cells."""
        self._check_written(threads, rectangle, "reads")
        self._plane(self._reads, int(threads.flat[0]) // LANES)[rectangle.cells] = PENDING

    def thread_read_done(self, warp: int, rectangle: Rectangle) -> None:
        """tcgen05.wait::ld"""
        self._reads[warp][rectangle.cells] = self.clocks.order.now[warp]

    def thread_writes(self, threads: np.ndarray, rectangle: Rectangle) -> None:
        """tcgen05.st of a warp; `threads` is broadcast against the cells."""
        self._check_written(threads, rectangle, "writes")
        self._check_reads(threads, rectangle, None)
        self._set(rectangle, threads, PENDING, 0)

    def thread_write_done(self, warp: int, rectangle: Rectangle) -> None:
        """tcgen05.wait::st"""
        self._written[rectangle.cells] = self.clocks.order.now[warp]

    def pipe_reads(self, thread: int, number: int, rectangle: Rectangle) -> None:
        """Operation `number` of a thread's pipe reads an operand."""
        agent = self.clocks.pipes[thread]
        self._check_written(np.array([[thread]]), rectangle, "reads", (agent, (COPIED, SHIFTED)))
        self._plane(self._pipe_reads, agent)[rectangle.cells] = number

    def pipe_writes(self, thread: int, number: int, rectangle: Rectangle, form: int) -> None:
        """Operation `number` of a thread's pipe writes a result.

        What products wrote in the same form comes before it, copies and shifts come before
        products, shifts before copies, products before shifts.
        """
        agent, row = self.clocks.pipes[thread], np.array([[thread]])
        before = {COPIED: (SHIFTED,), SHIFTED: ()}.get(form, (form, COPIED, SHIFTED))
        self._check_written(row, rectangle, "writes", (agent, before), shifts=form == SHIFTED)
        self._check_reads(row, rectangle, agent)
        self._set(rectangle, np.array(agent), number, form)

    def check_free(self, thread: int, rectangle: Rectangle) -> None:
        """A thread that frees columns must come after every access; this needs no fences."""
        cells, clocks = rectangle.cells, self.clocks
        late = self._written[cells] > clocks.plain(thread, self._writer[cells])
        for warp, plane in self._reads.items():
            agents = np.arange(warp * LANES, (warp + 1) * LANES)
            late |= plane[cells] > clocks.plain(thread, agents).min()
        for agent, plane in self._pipe_reads.items():
            late |= plane[cells] > clocks.plain(thread, agent)
        if late.any():
            message = f"frees {_first(rectangle, late)}, which others may still access"
            raise Fault("race", f"{message}: nothing orders the two")

    def _set(self, rectangle: Rectangle, writer: np.ndarray, moment: int, form: int) -> None:
        cells = rectangle.cells
        self._writer[cells], self._written[cells], self._form[cells] = writer, moment, form
        for plane in (*self._reads.values(), *self._pipe_reads.values()):
            plane[cells] = 0

    def _check_written(
        self,
        threads: np.ndarray,
        rectangle: Rectangle,
        verb: str,
        pipelined: tuple[int, tuple[int, ...]] | None = None,
        shifts: bool = False,
    ) -> None:
        """Faults unless the last writes are known; `pipelined` is an agent and forms in order."""
        cells, clocks = rectangle.cells, self.clocks
        writer, written = self._writer[cells], self._written[cells]
        late = written > clocks.known(threads, writer)
        if not late.any():
            return
        if pipelined is not None:
            agent, forms = pipelined
            form = self._form[cells]
            ordered = np.isin(form, forms) | (form > 0 if shifts else False)
            # This holds for another thread's pipe, too, if fences and a barrier order the issues.
            pipes = np.where(writer < clocks.threads, agent, writer)
            issued = (writer >= clocks.threads) & (
                written <= clocks.known(threads, pipes + PIPE_SLOTS)
            )
            late &= ~(ordered & ((writer == agent) | issued))
            if not late.any():
                return
        at = tuple(np.argwhere(late)[0])
        thread = int(np.broadcast_to(threads, late.shape)[at])
        self._fail(thread, int(writer[at]), int(written[at]), f"{verb} {_first(rectangle, late)}")

    def _fail(self, thread: int, agent: int, moment: int, what: str, did: str = "writes") -> None:
        clocks, lane = self.clocks, thread % LANES
        pipe = agent >= clocks.threads
        who = f"thread {agent}"
        if pipe:
            issuer = next(t for t, a in clocks.pipes.items() if a == agent)
            who = f"an operation that thread {issuer} issued"
        what = f"{what} of tensor memory, which {who} {did}"
        if moment == PENDING:
            wait = "st" if did == "writes" else "ld"
            raise Fault("tensor-wait", f"{what}, before its tcgen05.wait::{wait}", lane)
        if moment > clocks.plain(thread, agent):
            raise Fault("race", f"{what}, and nothing orders the two", lane)
        missing = "tcgen05.fence::after_thread_sync after the barrier"
        if not pipe:
            missing = f"tcgen05.fence::before_thread_sync before the barrier, or no {missing}"
        raise Fault("tensor-fence", f"{what}: a barrier is between, but no {missing}", lane)

    def _check_reads(self, threads: np.ndarray, rectangle: Rectangle, own: int | None) -> None:
        """Faults unless all reads are known; a pipe's writes come after its own reads."""
        cells, clocks = rectangle.cells, self.clocks
        for warp, plane in self._reads.items():
            read = plane[cells]
            if not read.any():
                continue
            agents = np.arange(warp * LANES, (warp + 1) * LANES)
            least = clocks.known(threads[..., None], agents).min(-1)
            late = read > least
            if late.any():
                at = tuple(np.argwhere(late)[0])
                thread = int(np.broadcast_to(threads, late.shape)[at])
                where = f"writes {_first(rectangle, late)}"
                known = clocks.known(thread, agents)
                agent = int(agents[np.argmin(np.minimum(known, clocks.plain(thread, agents)))])
                self._fail(thread, agent, int(read[at]), where, "reads")
        for agent, plane in self._pipe_reads.items():
            late = plane[cells] > clocks.known(threads, agent)
            if agent != own and late.any():
                at = tuple(np.argwhere(late)[0])
                thread = int(np.broadcast_to(threads, late.shape)[at])
                where = f"writes {_first(rectangle, late)}"
                self._fail(thread, agent, int(plane[cells][at]), where, "reads")

    def _plane(self, planes: dict[int, np.ndarray], key: int) -> np.ndarray:
        if key not in planes:
            planes[key] = np.zeros((TENSOR_LANES, TENSOR_COLUMNS), np.int32)
        return planes[key]


def _first(rectangle: Rectangle, late: np.ndarray) -> str:
    lane, column = np.argwhere(late)[0]
    return f"lane {rectangle.lane + lane}, column {rectangle.column + column}"
