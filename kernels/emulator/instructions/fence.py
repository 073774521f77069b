"""fence and membar: of barriers' initialisations, proxies, tensor maps and threads."""

from __future__ import annotations

import functools

import numpy as np

from kernels.emulator import tensor_map
from kernels.emulator.machine.warp import Warp, address_reader
from kernels.emulator.ptx.entries import SOURCES, Cost, Demand, Effect, Entry, always
from kernels.emulator.ptx.syntax import Immediate, Instruction

_PROXY_SPACES = ((), ("shared:cta",), ("shared:cluster",), ("global",))
_SCOPES = (("cta",), ("cluster",), ("gpu",), ("sys",))


def _proxy(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    space = instruction.words[3:]
    return functools.partial(_fence_proxy, "".join(space)) if space in _PROXY_SPACES else None


def _fence_init(warp: Warp, mask: np.ndarray) -> None:
    clocks = warp.cta.clocks
    if clocks is not None:
        threads = warp.lanes[mask]
        for barrier in warp.cta.barriers.values():
            seen = clocks.clock[threads, barrier.slot]
            fenced = clocks.fenced[:, threads, barrier.slot]
            clocks.fenced[:, threads, barrier.slot] = np.maximum(fenced, seen)
        clocks.publish(threads, only_barriers=True)


def _fence_proxy(space: str, warp: Warp, mask: np.ndarray) -> None:
    cta = warp.cta
    if cta.clocks is not None:
        cta.clocks.fence_proxy(warp.lanes[mask], cta.rank, space)


def _fence_map(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """fence.proxy.tensormap: a map's writer has .release, its user .acquire of its 128 bytes."""
    way, scope = instruction.words[3], instruction.words[4:]
    if scope not in _SCOPES or way not in ("release", "acquire"):
        return None
    if way == "release":

        def release(warp: Warp, mask: np.ndarray) -> None:
            if warp.cta.clocks is not None:
                warp.cta.clocks.release_maps(warp.lanes[mask])

        return release

    if instruction.operands[1] != Immediate(tensor_map.BYTES):
        return None
    address_of = address_reader(instruction.operands[0], symbols)

    def acquire(warp: Warp, mask: np.ndarray) -> None:
        if warp.cta.clocks is not None:
            warp.cta.clocks.acquire_maps(warp.lanes[mask], address_of(warp)[mask])

    return acquire


def _threads(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    return _fence if instruction.words[2:] in _SCOPES else None


def _fence(warp: Warp, mask: np.ndarray) -> None:
    """fence.acq_rel, fence.sc, membar: scopes are all taken as wide enough."""
    cta, threads = warp.cta, warp.lanes[mask]
    cta.release_reductions(threads)
    if cta.clocks is not None and cta.machine.global_order is not None:
        cta.machine.global_order.fence(cta.clocks, threads)
        cta.clocks.fence(threads)


_THREADS = Cost("synchronisation", SOURCES)
_PROXIES = Cost("synchronisation", Demand("proxy fence", operands="sources", blocks=True))

ENTRIES = (
    Entry("fence.mbarrier_init.release.cluster", always(_fence_init), _THREADS),
    Entry("fence.proxy.async.*", _proxy, _PROXIES),
    Entry("fence.proxy.tensormap::generic.*", _fence_map, _PROXIES),
    Entry("fence.acq_rel.*", _threads, _THREADS),
    Entry("fence.sc.*", _threads, _THREADS),
    Entry("membar.cta", always(_fence), _THREADS),
    Entry("membar.gl", always(_fence), _THREADS),
    Entry("membar.sys", always(_fence), _THREADS),
)
