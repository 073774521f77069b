"""atom and red: atomic operations on shared and global memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kernels.emulator.instructions.ld_st import PIPES, elements, polled, space_of
from kernels.emulator.machine.cta import Reduction
from kernels.emulator.machine.spaces import SHARED, Part, parts
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
from kernels.emulator.ptx.entries import Cost, Demand, Effect, Entry, Reduce
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Instruction, Operand, Register
from kernels.emulator.subnormals import flush

_SCOPES = {"cta", "cluster", "gpu", "sys"}
_COUNTS = {"v2": 2, "v4": 4, "v8": 8}
_MEANINGS = {"relaxed", "acquire", "release", "acq_rel"}
_SPACES = {*SHARED, "shared:cluster", "global"}
DTYPES: dict[str, Any] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b16": np.uint16,
    "b32": np.uint32,
    "b64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f16x2": np.float16,
    "bf16x2": ml_dtypes.bfloat16,
}

Update = Callable[..., np.ndarray]


def _increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, 0, old + 1)


def _decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - 1)


UPDATES: dict[str, Update] = {
    "add": lambda old, new: old + new,
    "min": lambda old, new: np.fmin(old, new),
    "max": lambda old, new: np.fmax(old, new),
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "inc": _increment,
    "dec": _decrement,
    "exch": lambda old, new: new,
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
}
"""What an update leaves in memory, from what was there and the operands."""

_FLOATS = {"add"}
_HALVES = {"add", "min", "max"}
_INTEGERS = {"add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas"}


@dataclasses.dataclass(frozen=True)
class Form:
    """What the modifiers say: `size` bytes of memory an element, `count` elements."""

    space: str
    operation: str
    type_: str
    count: int
    meaning: str

    @classmethod
    def of(cls, words: tuple[str, ...]) -> Form | None:
        """Reads the words of a mnemonic; returns None if a modifier is not known."""
        modifiers = {word for word in words[1:-1] if word != "L2:cache_hint"}
        operation, space = modifiers & UPDATES.keys(), modifiers & _SPACES
        meaning, counts = modifiers & _MEANINGS, modifiers & _COUNTS.keys()
        rest = modifiers - operation - space - meaning - counts - _SCOPES - {"noftz"}
        if rest or len(operation) != 1 or words[-1] not in DTYPES:
            return None
        (name,), type_ = operation, words[-1]
        count = next((_COUNTS[word] for word in counts), 1)
        form = cls("".join(space), name, type_, count, "".join(meaning) or "relaxed")
        return form if form.exists else None

    @property
    def exists(self) -> bool:
        """Whether the ISA has this operation for this type and number of elements."""
        if self.type_ in ("f16", "bf16", "f16x2", "bf16x2"):
            return self.operation in _HALVES
        if self.type_ in ("f32", "f64"):
            return self.operation in _FLOATS
        return self.operation in _INTEGERS and self.count == 1

    @property
    def halves(self) -> int:
        """Values in a 32-bit element."""
        return 2 if self.type_.endswith("x2") else 1

    @property
    def dtype(self) -> np.dtype:
        """The type of a value in memory."""
        return np.dtype(DTYPES[self.type_])

    @property
    def whole(self) -> int:
        """Bytes of an update."""
        return self.dtype.itemsize * self.halves * self.count

    def update(self, old: np.ndarray, operands: list[np.ndarray]) -> np.ndarray:
        """The value that the update leaves in memory."""
        if self.type_ == "f32" and self.space not in ("shared", "shared:cta", "shared:cluster"):
            old, operands = flush(old), [flush(operand) for operand in operands]
            return flush(UPDATES[self.operation](old, *operands))
        return UPDATES[self.operation](old, *operands).astype(self.dtype)


def _bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    form = Form.of(instruction.words)
    if form is None:
        return None
    operands = list(instruction.operands)
    result = operands.pop(0) if instruction.opcode == "atom" else None
    needed = 2 if form.operation == "cas" else 1
    values = operands[1 : 1 + needed]
    if len(values) != needed:
        return None
    addresses_of = address_reader(operands[0], symbols)
    sources = [_values(x, form, symbols) for x in values]
    if result is None and form.operation == "add" and form.halves == 1 and form.type_[0] != "b":
        return _reduce(addresses_of, sources[0], form)
    return _update(instruction, addresses_of, sources, form, result)


def _values(operand: Operand, form: Form, symbols: dict[str, int]) -> Reader:
    """Reads an operand as (lanes, values of memory)."""
    bytes_each = form.dtype.itemsize * form.halves
    read = [reader(x, _view(x, bytes_each), symbols) for x in elements(operand)]

    def values(warp: Warp) -> np.ndarray:
        words = np.stack([one(warp) for one in read], 1).astype(f"u{bytes_each}")
        return words.view(form.dtype)

    return values


def _view(operand: Operand, bytes_each: int) -> str:
    return f"u{operand.bank[1:]}" if isinstance(operand, Register) else f"u{8 * bytes_each}"


def _begin(part: Part, form: Form, reads: bool) -> None:
    """Order before an update: what it releases and, if it reads, acquires."""
    warp, device = part.warp, part.warp.cta.machine.global_order
    cta, threads = warp.cta, part.threads
    # The largest of fp32 values, as bits, is a mix of max.s32 and min.u32: in any order the same.
    counts = form.operation in ("add", "max", "min") and form.type_[0] in "us"
    part.writes(form.whole, atomic=True, counts=counts)
    if form.meaning in ("release", "acq_rel"):
        cta.release_reductions(threads)
    if device is None or cta.clocks is None:
        return
    keys = part.keys
    if reads:
        relaxed = form.meaning not in ("acquire", "acq_rel")
        device.acquire(cta.clocks, threads, keys, relaxed)
    releases = form.meaning in ("release", "acq_rel")
    hand_over = device.release if releases else device.release_fenced
    hand_over(cta.clocks, threads, keys, True)


def _update(
    instruction: Instruction,
    addresses_of: Reader,
    sources: list[Reader],
    form: Form,
    result: Operand | None,
) -> Effect:
    """Lanes one after the other, in an order that the policy's seed gives."""
    size = form.dtype.itemsize
    number = form.whole // size

    def effect(warp: Warp, mask: np.ndarray) -> Yield | Wait:
        changes = False
        operands = [source(warp) for source in sources]
        old = np.zeros((len(mask), number), form.dtype)
        for part in parts(warp, mask, addresses_of(warp), form.space, form.whole):
            part.settle()
            _begin(part, form, result is not None)
            addresses = dict(zip(np.flatnonzero(part.lanes).tolist(), part.addresses, strict=True))
            for lane in warp.cta.machine.shuffled(list(addresses)):
                address = addresses[lane].reshape(1)
                there = part.region.load(address, size, number).view(form.dtype)
                old[lane] = there[0]
                new = form.update(there, [operand[lane : lane + 1] for operand in operands])
                words = np.ascontiguousarray(new).view(f"u{size}")
                if (words != there.view(f"u{size}")).any():
                    part.region.store(address, words)
                    part.changed()
                    changes = True
        if result is not None:
            bytes_each = size * form.halves
            words = old.view(f"u{bytes_each}")
            for column, one in enumerate(elements(result)):
                if isinstance(one, Register):
                    write(warp, mask, one, f"u{one.bank[1:]}", words[:, column])
        if changes or result is None:
            return YIELD
        return polled(warp, instruction, addresses_of(warp)[mask], old[mask].view(f"u{size}"))

    return effect


def _reduce(addresses_of: Reader, source: Reader, form: Form) -> Effect:
    """red.add: a relaxed one happens now, or before a release to the device that comes after it."""
    releases = form.meaning == "release"

    def effect(warp: Warp, mask: np.ndarray) -> Yield | None:
        cta, values = warp.cta, source(warp)
        for part in parts(warp, mask, addresses_of(warp), form.space, form.whole):
            moment = 0 if cta.clocks is None else int(cta.clocks.now[warp.number])
            chosen = values[part.lanes]
            _begin(part, form, False)
            reduction = Reduction(part.region, part.threads, moment, part.addresses, chosen)
            if releases or part.home is not None:
                reduction.perform(np.ones(len(chosen), bool))
                part.changed()
            else:
                cta.reduce(reduction)
        return YIELD if releases else None

    return effect


def _cost(instruction: Instruction) -> Cost:
    form, space = Form.of(instruction.words), space_of(instruction.words)
    assert form is not None
    reduces, device = instruction.opcode == "red", space == "global"
    return Cost(
        f"{space} memory",
        Demand(
            PIPES.get(space, "unknown"),
            operands="sources" if reduces else "result first",
            action=Reduce(LANES * form.whole) if reduces and device else None,
        ),
        per_lane={"global_reduced_bytes": form.whole} if device else {},
    )


ENTRIES = (Entry("atom.*", _bind, _cost), Entry("red.*", _bind, _cost))
