"""The operations that one thread issues to the tensor core, in order: products and copies.

They are performed in the order of their issue: at once, or when the arrival of a later commit is
performed, which is when nothing else can run. So operands may be read, and results be written, at
any moment until the commit's mbarrier completes its phase.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.emulator.memory import Fault
from kernels.emulator.order.clocks import Knowledge

if TYPE_CHECKING:
    from kernels.emulator.machine.cta import Cta
    from kernels.emulator.machine.transfers import Transfer
    from kernels.emulator.machine.warp import Warp


class Pipe:
    """Operations that one thread has issued. `issued` counts them, `agent` is its column.

    `commit` is the arrival of the last commit.
    """

    def __init__(self, cta: Cta, thread: int):
        self.thread, self.issued, self.committed = thread, 0, 0
        self._cta, self._made = cta, 0
        self._known: Knowledge | None = None
        self.commit: Transfer | None = None
        clocks = cta.tensor_clocks
        self.agent = 0 if clocks is None else clocks.new_pipe(thread)

    def issue(self, operation: Callable[[], None]) -> None:
        """Accepts an operation whose accesses have been checked."""
        self.issued += 1
        if self._cta.tensor_clocks is not None:
            self._cta.tensor_clocks.issued[self.agent - self._cta.tensor_clocks.threads] += 1
        self._cta.tensor_operations.append((self, operation))
        order = self._cta.order
        if order is not None:
            # The thread's knowledge; of its own stores only those that an operation may read.
            clock = order.clock[self.thread].copy()
            clock[self.thread] = order.fenced[self.thread, self.thread]
            self._known = Knowledge(clock, order.clocks.fenced[:, self.thread].copy())
        if self._cta.machine.early():
            self.perform(self.issued)

    def perform(self, number: int) -> None:
        """Performs the operations up to this number, and what other threads issued before."""
        while self._made < number:
            pipe, operation = self._cta.tensor_operations.popleft()
            pipe._made += 1
            operation()

    def done(self, number: int) -> Knowledge | None:
        """What a thread knows that sees the operations up to this number complete."""
        clocks = self._cta.tensor_clocks
        if clocks is None or self._known is None:
            return None
        clock = self._known.clock.copy()
        clock[clocks.column(self.agent)] = number
        return Knowledge(clock, self._known.fenced)


def pipe_of(warp: Warp, thread: int) -> Pipe:
    """The pipe of a thread."""
    pipes = warp.cta.pipes
    if thread not in pipes:
        pipes[thread] = Pipe(warp.cta, thread)
    return pipes[thread]


def check_end(cta: Cta) -> None:
    """Faults if the CTA ends with columns allocated or operations that nobody has waited for."""
    if cta.machine.program.uses_tensor_memory and cta.tensor.allocations:
        raise Fault("outstanding", f"the CTA ends with columns allocated: {cta.tensor.allocations}")
    for pipe in cta.pipes.values():
        if pipe.committed < pipe.issued:
            number = pipe.issued - pipe.committed
            message = f"the CTA ends, but no commit follows the last {number} operations"
            raise Fault("outstanding", f"{message} of thread {pipe.thread}")
    clocks, order = cta.tensor_clocks, cta.order
    if clocks is None or order is None:
        return
    for thread, number in cta.tensor.touched.items():
        column = clocks.column(clocks.pipes[thread])
        if int(order.clock[order.own, column].max()) < number:
            message = "the CTA ends, but none of its threads waits for the tcgen05 operations of"
            raise Fault("outstanding", f"{message} thread {thread} on its memory")
