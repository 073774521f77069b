"""griddepcontrol and nanosleep: waits that nothing in one launch ends."""

from __future__ import annotations

import numpy as np

from kernels.emulator.machine.warp import YIELD, Warp, Yield
from kernels.emulator.ptx.entries import CONTROL, Entry, always


def _nothing(warp: Warp, mask: np.ndarray) -> None:
    """griddepcontrol: in one launch there is no other grid to wait for or to let start."""


def _sleep(warp: Warp, mask: np.ndarray) -> Yield:
    return YIELD


ENTRIES = (
    Entry("griddepcontrol.wait", always(_nothing), CONTROL),
    Entry("griddepcontrol.launch_dependents", always(_nothing), CONTROL),
    Entry("nanosleep.u32", always(_sleep), CONTROL),
)
