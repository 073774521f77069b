"""An asynchronous copy between its issue and the moment it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kernels.emulator.syntax import Instruction

if TYPE_CHECKING:
    from kernels.emulator.cta import Cta
    from kernels.emulator.warp import Warp


@dataclasses.dataclass
class Transfer:
    """An issued copy. `perform` makes it; `warp`, `lane` and `instruction` issued it.

    `chunks` are what it touches of the shared memory of `home`, numbered from that CTA's base.
    """

    warp: Warp
    lane: int
    instruction: Instruction
    home: Cta
    perform: Callable[[], None]
    chunks: np.ndarray
    made: bool = False
