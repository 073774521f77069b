"""fence and membar: of barriers' initialisations, proxies, tensor maps and threads."""

from __future__ import annotations

import functools

import numpy as np

from kernels.emulator import tensor_map
from kernels.emulator.machine.warp import Warp, address_reader
from kernels.emulator.ptx.program import Effect
from kernels.emulator.ptx.syntax import Immediate, Instruction

_PROXY_SPACES = ((), ("shared:cta",), ("shared:cluster",), ("global",))
_SCOPES = (("cta",), ("cluster",), ("gpu",), ("sys",))
_MAP_FENCE = ("fence", "proxy", "tensormap:generic")
_MEMORY_BARRIERS = (("membar", "cta"), ("membar", "gl"), ("membar", "sys"))


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of a fence, or None if it is none."""
    words = instruction.words
    if words == ("fence", "mbarrier_init", "release", "cluster"):
        return _fence_init
    if words[:3] == ("fence", "proxy", "async") and words[3:] in _PROXY_SPACES:
        return functools.partial(_fence_proxy, "".join(words[3:]))
    if words[:3] == _MAP_FENCE and words[4:] in _SCOPES and words[3] in ("release", "acquire"):
        return _fence_map(instruction, symbols)
    if words[0] == "fence" and words[1] in ("acq_rel", "sc") and words[2:] in _SCOPES:
        return _fence
    if words in _MEMORY_BARRIERS:
        return _fence
    return None


def _fence_init(warp: Warp, mask: np.ndarray) -> None:
    order = warp.cta.order
    if order is not None:
        threads = warp.lanes[mask]
        for barrier in warp.cta.barriers.values():
            seen = order.clock[threads, barrier.slot]
            fenced = order.clocks.fenced[:, threads, barrier.slot]
            order.clocks.fenced[:, threads, barrier.slot] = np.maximum(fenced, seen)
        order.publish(threads, only_barriers=True)


def _fence_proxy(space: str, warp: Warp, mask: np.ndarray) -> None:
    if warp.cta.order is not None:
        warp.cta.order.fence_proxy(warp.lanes[mask], space)


def _fence_map(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """fence.proxy.tensormap: .release by who wrote a map, .acquire of its 128 bytes by its user."""
    if instruction.words[3] == "release":

        def release(warp: Warp, mask: np.ndarray) -> None:
            if warp.cta.order is not None:
                warp.cta.order.release_maps(warp.lanes[mask])

        return release

    if instruction.operands[1] != Immediate(tensor_map.BYTES):
        return None
    address_of = address_reader(instruction.operands[0], symbols)

    def acquire(warp: Warp, mask: np.ndarray) -> None:
        if warp.cta.order is not None:
            warp.cta.order.acquire_maps(warp.lanes[mask], address_of(warp)[mask])

    return acquire


def _fence(warp: Warp, mask: np.ndarray) -> None:
    """fence.acq_rel, fence.sc, membar: scopes are all taken as wide enough."""
    cta, threads = warp.cta, warp.lanes[mask]
    cta.release_reductions(threads)
    if cta.order is not None and cta.machine.global_order is not None:
        cta.machine.global_order.fence(cta.cluster.number, cta.order, threads)
        cta.order.fence(threads)
