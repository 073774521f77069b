"""ld and st of every state space, and what only advises the caches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from kernels.emulator.machine.spaces import SPACES, Part, parts
from kernels.emulator.machine.warp import (
    YIELD,
    Reader,
    Wait,
    Warp,
    Yield,
    address_reader,
    reader,
    write,
)
from kernels.emulator.ptx.entries import UNKNOWN, Cost, Demand, Effect, Entry, Pipe, always
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Address, Instruction, Operand, Register, Symbol, Vector
from kernels.emulator.ptx.windows import PARAMETER_BASE

_HINT = re.compile(r"L[12]:.*|c[agsv]|lu|w[bt]|nc|cta|cluster|gpu|sys|unified")
_ATTEMPTS = 8
_COUNTS = {"v2": 2, "v4": 4, "v8": 8}
_LOADS = {"weak", "volatile", "relaxed", "acquire", "mmio"}
_STORES = {"weak", "volatile", "relaxed", "release", "mmio"}
_BITS = ("8", "16", "32", "64", "128")
_MOST_BYTES = 32
_KINDS = ("param", "shared", "global", "local", "const")
_ORDERED = {"volatile", "acquire", "release", "relaxed"}
"""Words of an access across which the compiler moves nothing."""
PIPES: dict[str, Pipe] = {
    "param": "free",
    "shared": "shared memory",
    "global": "global memory",
}
"""The pipe of an access by its state space; others are not modelled."""
Putter = Callable[[Warp, np.ndarray, np.ndarray], None]


@dataclasses.dataclass(frozen=True)
class Form:
    """What the modifiers of an access say; `size` is bytes of each of `count` elements."""

    space: str
    kind: str
    size: int
    count: int
    meaning: str

    @classmethod
    def of(cls, words: tuple[str, ...], meanings: set[str]) -> Form | None:
        """Reads the words of a mnemonic; returns None if a modifier is not known."""
        kind, bits = words[-1][0], words[-1][1:]
        if kind not in "busf" or bits not in _BITS:
            return None
        modifiers = {word for word in words[1:-1] if not _HINT.fullmatch(word)}
        count = next((_COUNTS[word] for word in modifiers & _COUNTS.keys()), 1)
        space, meaning = modifiers & SPACES, modifiers & meanings
        rest = modifiers - space - meaning - _COUNTS.keys()
        if rest or len(space) > 1 or len(meaning) > 1 or int(bits) // 8 * count > _MOST_BYTES:
            return None
        form = cls("".join(space), kind, int(bits) // 8, count, "".join(meaning) or "weak")
        return form if form.meaning == "weak" or form.space not in ("param", "const") else None

    @property
    def whole(self) -> int:
        """Bytes of an access."""
        return self.size * self.count

    @property
    def strong(self) -> bool:
        """Whether it races with nobody else's strong accesses."""
        return self.meaning != "weak"


def _advice(warp: Warp, mask: np.ndarray) -> None:
    """prefetch and other advice to the caches has no effect that a program could see."""


def _policy(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    """createpolicy: an opaque number, which every access ignores."""

    def effect(warp: Warp, mask: np.ndarray) -> None:
        write(warp, mask, instruction.operands[0], "u64", np.uint64(0))

    return effect


def elements(operand: Operand) -> tuple[Operand, ...]:
    """The elements of a vector operand, or the operand itself."""
    return operand.elements if isinstance(operand, Vector) else (operand,)


def address_of(operand: Operand, symbols: dict[str, int], space: str) -> Reader:
    """Reads the addresses of an access. A named parameter lies in the parameter block."""
    assert isinstance(operand, Address)
    if space.startswith("param") and isinstance(operand.base, Symbol):
        operand = dataclasses.replace(operand, offset=operand.offset + PARAMETER_BASE)
    return address_reader(operand, symbols)


def _load(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    form, results = Form.of(instruction.words, _LOADS), elements(instruction.operands[0])
    if form is None or len(results) != form.count:
        return None
    put = [_putter(result, form) for result in results]
    addresses_of = address_of(instruction.operands[1], symbols, form.space)
    size, count, whole, strong = form.size, form.count, form.whole, form.strong
    word, number = (min(size, 8), count * max(size // 8, 1))

    def effect(warp: Warp, mask: np.ndarray) -> Yield | Wait | None:
        addresses = addresses_of(warp)
        if warp.trace is not None and np.ptp(addresses[mask]):
            warp.note_spread(instruction.line)
        words = np.empty((0, number), f"u{word}")
        for part in parts(warp, mask, addresses, form.space, whole):
            part.reads(whole, strong)
            loaded = part.region.load(part.addresses, word, number)
            if part.lanes is mask:
                words = loaded
            else:
                words = words if words.size else np.empty((int(mask.sum()), number), f"u{word}")
                words[part.lanes[mask]] = loaded
            if strong:
                _acquire(part, form.meaning != "acquire")
        if size == 16:
            words = words.reshape(len(words), count, 2)
        for column, place in enumerate(put):
            if place is not None:
                place(warp, mask, words[:, column])
        return polled(warp, instruction, addresses[mask], words) if strong else None

    return effect


def _putter(result: Operand, form: Form) -> Putter | None:
    """Stores a column of loaded words in a register, extended to its width; None for a sink."""
    if isinstance(result, Symbol) and result.name == "_":
        return None
    assert isinstance(result, Register)
    index, bank = result.index, result.bank
    if bank == "b128":

        def put_quad(warp: Warp, mask: np.ndarray, column: np.ndarray) -> None:
            warp.b128[index][mask] = column

        return put_quad
    view = f"{'s' if form.kind == 's' else 'u'}{bank[1:]}"
    if int(bank[1:]) < 8 * form.size:
        raise ValueError(f"{result.name} is narrower than {form.size} bytes")
    signed = f"i{form.size}" if form.kind == "s" and int(bank[1:]) > 8 * form.size else None

    def put(warp: Warp, mask: np.ndarray, column: np.ndarray) -> None:
        getattr(warp, view)[index][mask] = column if signed is None else column.view(signed)

    return put


def _acquire(part: Part, relaxed: bool) -> None:
    cta, device = part.warp.cta, part.warp.cta.machine.global_order
    if device is not None and cta.clocks is not None:
        device.acquire(cta.clocks, part.threads, part.keys, relaxed)


def polled(
    warp: Warp, instruction: Instruction, addresses: np.ndarray, words: np.ndarray
) -> Yield | Wait:
    """A warp that reads the same value again and again sleeps until memory changes.

    It might be no loop that waits for another value, so the sleeper gets a few more attempts when
    nothing else can run.
    """
    cta, memory = warp.cta, warp.cta.machine.memory
    version = memory.version, cta.shared_version
    seen = (instruction.line, addresses.tobytes(), words.tobytes(), version)
    if warp.polled != seen:
        warp.polled, warp.attempts = seen, _ATTEMPTS
        return YIELD
    return Wait(
        lambda: (memory.version, cta.shared_version) != version or warp.wakes(),
        lambda: None,
        lambda: f"another value than {words.reshape(-1)[0]} in memory",
    )


def _store(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    form = Form.of(instruction.words, _STORES)
    if form is None or form.space in ("param", "const"):
        return None
    size, count, whole, strong = form.size, form.count, form.whole, form.strong
    given = elements(instruction.operands[1])
    if len(given) != count:
        return None
    addresses_of = address_reader(instruction.operands[0], symbols)
    sources = [_bits(x, size, symbols) for x in given]

    def effect(warp: Warp, mask: np.ndarray) -> Yield | None:
        if size == 16:
            values = np.concatenate([source(warp)[mask] for source in sources], 1)
        else:
            values = np.stack([source(warp)[mask] for source in sources], 1).astype(f"u{size}")
        for part in parts(warp, mask, addresses_of(warp), form.space, whole):
            part.writes(whole, strong)
            _release(part, form.meaning)
            chosen = values if part.lanes is mask else values[part.lanes[mask]]
            part.region.store(part.addresses, chosen)
            part.changed()
        return YIELD if strong else None

    return effect


def _release(part: Part, meaning: str) -> None:
    """Hands over what a thread that acquires the stored value learns."""
    cta, device = part.warp.cta, part.warp.cta.machine.global_order
    if device is None or cta.clocks is None:
        return
    if meaning == "weak":
        device.overwrite(part.keys)
        return
    if meaning == "release":
        cta.release_reductions(part.threads)
    hand_over = device.release if meaning == "release" else device.release_fenced
    hand_over(cta.clocks, part.threads, part.keys, False)


def _bits(operand: Operand, size: int, symbols: dict[str, int]) -> Reader:
    """Reads the low `size` bytes of a register, which may be wider, or a constant."""
    if isinstance(operand, Register) and operand.bank == "b128":
        index = operand.index
        return lambda warp: warp.b128[index]
    wide = int(operand.bank[1:]) if isinstance(operand, Register) else max(8 * size, 16)
    return reader(operand, f"u{wide}", symbols)


def space_of(words: tuple[str, ...]) -> str:
    """The state space that the words of an access name."""
    spaces = (word.split(":")[0] for word in words[1:])
    return next((space for space in spaces if space in _KINDS), "generic")


def access_cost(words: tuple[str, ...], size: int) -> Cost:
    """The cost of a load or a store of `size` bytes a lane, asynchronous stores among them.

    What goes to another CTA passes that one's port of shared memory. It counts as the own port's,
    since CTAs of a cluster do alike; an asynchronous store counts where it arrives.
    """
    space, loads = space_of(words), words[0] == "ld"
    distributed = "shared:cluster" in words
    through_port = space == "shared" and "async" not in words
    counted = {}
    if space in ("shared", "global"):
        way = "read" if loads else "written"
        counted = {f"{'distributed' if distributed else space}_{way}_bytes": size}
    return Cost(
        f"{space} memory",
        Demand(
            PIPES.get(space, "unknown"),
            shared_bytes=LANES * size if through_port else 0,
            broadcast=loads,
            operands="result first" if loads else "sources",
            memory="reads" if loads else "writes",
            movable=not _ORDERED & set(words),
        ),
        per_lane=counted,
    )


def _cost(instruction: Instruction) -> Cost:
    form = Form.of(instruction.words, _LOADS | _STORES)
    assert form is not None
    return access_cost(instruction.words, form.whole)


ENTRIES = (
    Entry("ld.*", _load, _cost),
    Entry("st.*", _store, _cost),
    Entry("ldu.*", _load, Cost("other", UNKNOWN)),
    Entry("prefetch.*", always(_advice), Cost("global memory", Demand("free", operands="sources"))),
    Entry("prefetchu.*", always(_advice), Cost("other", UNKNOWN)),
    Entry("applypriority.*", always(_advice), Cost("other", UNKNOWN)),
    Entry("discard.*", always(_advice), Cost("other", UNKNOWN)),
    Entry("createpolicy.*", _policy, Cost("other", UNKNOWN)),
)
