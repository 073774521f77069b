"""clusterlaunchcontrol: a running cluster takes the place of one that has not started yet."""

from __future__ import annotations

import functools

import numpy as np

from kernels.emulator.instructions.cp_async_bulk import (
    LoadForm,
    chunks_of,
    destinations,
    fill,
    issue_load,
)
from kernels.emulator.machine.cta import Cta
from kernels.emulator.machine.transfers import Transfer
from kernels.emulator.machine.warp import YIELD, Warp, Yield, address_reader, write
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import CONTROL, Cost, Effect, Entry
from kernels.emulator.ptx.syntax import Instruction, Register, Vector

RESPONSE_BYTES = 16
_FORM = LoadForm(cluster=False, multicast=False, paired=False)
_AXES = ("x", "y", "z")


def _bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = instruction.words
    if words[-1] != "b128":
        return None
    if words[1:3] == ("try_cancel", "async"):
        rest = [word for word in words[3:-1] if word != "shared:cta"]
        if rest[:1] != ["mbarrier:complete_tx:bytes"]:
            return None
        if rest[1:] not in ([], ["multicast:cluster:all"]):
            return None
        return _try_cancel(instruction, symbols, multicast=len(rest) > 1)
    if words[1:3] == ("query_cancel", "is_canceled"):
        return _is_canceled(instruction)
    if words[1] == "query_cancel" and words[2].startswith("get_first_ctaid"):
        return _first_cta(instruction)
    return None


def _try_cancel(instruction: Instruction, symbols: dict[str, int], multicast: bool) -> Effect:
    response_of, barrier_of = (address_reader(x, symbols) for x in instruction.operands)

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        cluster = warp.cta.cluster
        for lane in np.flatnonzero(mask).tolist():
            if cluster.refused:
                message = "try_cancel after the cluster has seen one that did not succeed"
                raise Fault("launch-control", message, lane)
            address, barrier = int(response_of(warp)[lane]), int(barrier_of(warp)[lane])
            ranks = (1 << len(cluster.ctas)) - 1 if multicast else None
            places = destinations(warp, _FORM, address, barrier, ranks)
            answer = _Answer(warp.cta)
            for place in places:
                chunks = chunks_of(place.home, place.address, RESPONSE_BYTES, RESPONSE_BYTES)
                perform = functools.partial(_respond, place.home, chunks, answer)
                transfer = Transfer(warp, lane, instruction, place.home, perform, chunks)
                issue_load(transfer, place.barrier, RESPONSE_BYTES, None)
        return YIELD

    return effect


class _Answer:
    """The response of one request: it is decided when it first arrives anywhere."""

    def __init__(self, cta: Cta):
        self._cta = cta

    @functools.cached_property
    def words(self) -> np.ndarray:
        """The first CTA of the cancelled cluster, and whether there is one."""
        index = self._cta.machine.cancel()
        first = (0, 0, 0)
        if index is not None:
            sizes = self._cta.cluster.shape
            first = tuple(at * size for at, size in zip(index, sizes, strict=True))
        return np.array([*first, index is not None], np.uint32)


def _respond(home: Cta, chunks: np.ndarray, answer: _Answer) -> None:
    fill(home, chunks, answer.words.view(np.uint8))


def _words(warp: Warp, source: Register) -> np.ndarray:
    return np.ascontiguousarray(warp.b128[source.index]).view(np.uint32)


def _is_canceled(instruction: Instruction) -> Effect:
    result, source = instruction.operands
    assert isinstance(source, Register)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        answers = _words(warp, source)[:, 3]
        if (answers[mask] > 1).any():
            raise Fault("launch-control", "this is no response of try_cancel")
        if (answers[mask] == 0).any():
            warp.cta.cluster.refused = True
        write(warp, mask, result, "pred", answers == 1)

    return effect


def _first_cta(instruction: Instruction) -> Effect | None:
    """Undefined, here zero, if the request did not succeed."""
    result, source = instruction.operands
    assert isinstance(source, Register)
    where = instruction.words[2].split(":")
    if instruction.words[3:] == ("v4", "b32", "b128") and isinstance(result, Vector):
        columns = list(enumerate(result.elements[:3]))
    elif instruction.words[3:] == ("b32", "b128") and where[-1] in _AXES:
        columns = [(_AXES.index(where[-1]), result)]
    else:
        return None

    def effect(warp: Warp, mask: np.ndarray) -> None:
        words = _words(warp, source)
        for column, target in columns:
            if isinstance(target, Register):
                write(warp, mask, target, "u32", words[:, column])

    return effect


ENTRIES = (
    Entry("clusterlaunchcontrol.try_cancel.*", _bind, CONTROL),
    Entry("clusterlaunchcontrol.query_cancel.*", _bind, Cost("control")),
)
