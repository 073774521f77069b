"""An asynchronous copy between its issue and the moment when it is performed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kernels.emulator.ptx.syntax import Instruction

_LANES = 32

if TYPE_CHECKING:
    from kernels.emulator.machine.cta import Cta
    from kernels.emulator.machine.warp import Warp
    from kernels.emulator.order.global_memory import Access


@dataclasses.dataclass(eq=False)
class Transfer:
    """An issued copy, which `perform` carries out; `warp`, `lane` and `instruction` issued it.

    `chunks` are what it touches of the shared memory of `home`, numbered from that CTA's base.
    A store has `data` as soon as its sources have been read; `waited` says that its thread knows.
    `access` is what it does to global memory, where the order of that is checked.
    """

    warp: Warp
    lane: int
    instruction: Instruction
    home: Cta
    perform: Callable[[], None]
    chunks: np.ndarray
    performed: bool = False
    waited: bool = False
    read: Callable[[], np.ndarray] | None = None
    data: np.ndarray | None = None
    access: Access | None = None

    def capture(self) -> None:
        """Reads the sources of a store, if they have not been read."""
        if self.data is None and self.read is not None:
            self.data = self.read()


class Copies:
    """The copies of a warp that its lanes have not waited for: open ones and groups, by lane."""

    def __init__(self) -> None:
        self.open: list[list[Transfer]] = [[] for _ in range(_LANES)]
        self.groups: list[list[list[Transfer]]] = [[] for _ in range(_LANES)]

    def left(self, lane: int) -> bool:
        """Whether a lane has copies that it has not waited for."""
        return bool(self.open[lane]) or any(self.groups[lane])
