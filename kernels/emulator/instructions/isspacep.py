"""isspacep: whether a generic address lies in a state space."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels.emulator.machine.cta import RANK_SHIFT
from kernels.emulator.machine.spaces import WINDOW_BYTES
from kernels.emulator.machine.warp import Warp, reader, write
from kernels.emulator.ptx.entries import FREE, Cost, Effect, Entry
from kernels.emulator.ptx.syntax import Instruction
from kernels.emulator.ptx.windows import LOCAL_WINDOW, SHARED_WINDOW

_IS: dict[str, Callable[[Warp, np.ndarray], np.ndarray]] = {
    "shared:cluster": lambda warp, a: _inside(a, SHARED_WINDOW, len(warp.cta.cluster.ctas)),
    "shared:cta": lambda warp, a: _inside(a, SHARED_WINDOW + warp.cta.base, 1),
    "shared": lambda warp, a: _inside(a, SHARED_WINDOW + warp.cta.base, 1),
    "local": lambda warp, a: (a >= LOCAL_WINDOW) & (a < LOCAL_WINDOW + WINDOW_BYTES),
    "global": lambda warp, a: (a < LOCAL_WINDOW) | (a >= SHARED_WINDOW + WINDOW_BYTES),
}


def _inside(addresses: np.ndarray, start: int, ctas: int) -> np.ndarray:
    return (addresses >= start) & (addresses < start + (ctas << RANK_SHIFT))


def _bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    if instruction.words[1] not in _IS:
        return None
    test, (result, source) = _IS[instruction.words[1]], instruction.operands
    address_of = reader(source, "u64", symbols)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        write(warp, mask, result, "pred", test(warp, address_of(warp).astype(np.int64)))

    return effect


ENTRIES = (Entry("isspacep.*", _bind, Cost("move", FREE)),)
