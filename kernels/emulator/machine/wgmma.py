"""Products of wgmma that a warp has issued, executed for each warp's sixteen rows by themselves.

A product is computed when its warp waits for it, or at once, as the policy says. Until the wait,
its accumulator registers must not be touched and its A registers not be written; before it, a
wgmma.fence must come after whatever wrote them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.products import matrix_product
from kernels.emulator.ptx.program import LANES, Run, Single, Step
from kernels.emulator.ptx.syntax import Instruction, Register, registers
from kernels.emulator.swizzle import CHUNK, swizzled

if TYPE_CHECKING:
    from kernels.emulator.machine.warp import Warp

_K = 16
_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}


@dataclasses.dataclass(frozen=True)
class Tile:
    """A shared-memory operand: its descriptor, its first row and the number of its rows."""

    descriptor: int
    mn_major: bool
    first: int
    rows: int


@functools.lru_cache(maxsize=4096)
def tile_elements(tile: Tile) -> np.ndarray:
    """Numbers of the 16-bit elements of a tile in shared memory: (rows, 16)."""
    start = (tile.descriptor & 0x3FFF) << 4
    leading = (tile.descriptor >> 16 & 0x3FFF) << 4
    stride = (tile.descriptor >> 32 & 0x3FFF) << 4
    if tile.descriptor >> 49 & 7:
        raise Fault("not implemented", "a matrix descriptor with a base offset")
    span = _SPANS[tile.descriptor >> 62]
    row = np.arange(tile.first, tile.first + tile.rows)[:, None]
    k = np.arange(_K)[None, :]
    width = span or CHUNK
    if tile.mn_major:
        columns, inside = row * 2 // width, row * 2 % width
        if not span:
            raise Fault("not implemented", "an MN-major operand without swizzle")
        address = columns * leading + inside + k // 8 * stride + k % 8 * width
    elif span:
        address = row // 8 * stride + row % 8 * span + k * 2
    else:
        address = row // 8 * stride + row % 8 * CHUNK + k // 8 * leading + k % 8 * 2
    address = start + address
    return swizzled(address // CHUNK, span) * (CHUNK // 2) + address % CHUNK // 2


@functools.lru_cache(maxsize=4096)
def tile_chunks(tile: Tile) -> np.ndarray:
    """The 16-byte chunks that a tile touches."""
    return np.unique(tile_elements(tile) // (CHUNK // 2))


@dataclasses.dataclass(frozen=True)
class Form:
    """What is fixed in one wgmma instruction; `a_registers` is None where A is in shared memory."""

    columns: int
    dtype: str
    accumulators: np.ndarray
    a_registers: np.ndarray | None
    a_mn_major: bool
    b_mn_major: bool
    signs: tuple[int, int]
    written: frozenset[Register]
    read: frozenset[Register]


@dataclasses.dataclass(frozen=True)
class Product:
    """An issued product: A is a tile or (16, 16) values that were in registers."""

    form: Form
    a: Tile | None
    b: Tile
    accumulate: bool
    chunks: np.ndarray
    instruction: Instruction


class Products:
    """The products of one warp: open ones, committed groups, and which registers are in flight."""

    def __init__(self, warp: Warp):
        self._warp = warp
        self._open: list[Product] = []
        self._groups: list[list[Product]] = []
        self._made = 0
        self.unfenced: set[int] = set()
        self.fenced = False
        self._written: frozenset[Register] = frozenset()
        self._read: frozenset[Register] = frozenset()

    @property
    def outstanding(self) -> int:
        """Products that nobody has waited for."""
        return len(self._open) + sum(len(group) for group in self._groups)

    def check_step(self, step: Step) -> None:
        """Faults if a step touches registers that are in flight."""
        if not isinstance(step, Run | Single) or not self._written:
            return
        if isinstance(step, Single) and step.instruction.opcode == "wgmma":
            return
        if self._written.isdisjoint(step.reads | step.writes) and self._read.isdisjoint(
            step.writes
        ):
            return
        touched = self._written & (step.reads | step.writes) | self._read & step.writes
        names = ", ".join(sorted(register.name for register in touched)[:4])
        instruction = _first_touching(step, touched)
        raise Fault(
            "wgmma-wait",
            f"line {instruction.line} ({instruction.text}) touches {names} before "
            "wgmma.wait_group: a product is in flight that writes or reads them",
        )

    def check_fenced(self, form: Form, steps: tuple[Step, ...]) -> None:
        """Faults if registers of a product were used after the last wgmma.fence."""
        if not self.fenced:
            raise Fault("wgmma-fence", "no wgmma.fence comes before the first product")
        for number in self.unfenced:
            step = steps[number]
            if not isinstance(step, Run | Single):
                continue
            loose = step.writes & form.read | (step.reads | step.writes) & form.written
            if loose and not (isinstance(step, Single) and step.instruction.opcode == "wgmma"):
                names = ", ".join(sorted(register.name for register in loose)[:4])
                raise Fault("wgmma-fence", f"{names} were used after the last wgmma.fence")

    def issue(self, product: Product) -> None:
        """Accepts a product."""
        order = self._warp.cta.order
        if order is not None:
            order.async_reads(self._warp.lanes, product.chunks)
        self._open.append(product)
        self._written |= product.form.written
        self._read |= product.form.read
        if self._warp.cta.machine.early():
            self._finish(self.outstanding)

    def commit(self) -> None:
        """wgmma.commit_group"""
        self._groups.append(self._open)
        self._open = []

    def wait(self, left: int) -> None:
        """wgmma.wait_group: all but the last `left` groups are done."""
        done = self._groups[: max(len(self._groups) - left, 0)]
        if not done:
            return
        products = [product for group in done for product in group]
        self._finish(len(products))
        self._made -= len(products)
        self._groups = self._groups[len(done) :]
        flying = [product for group in self._groups for product in group] + self._open
        order = self._warp.cta.order
        if order is not None:
            for product in products:
                order.async_read_done(self._warp.number, product.chunks)
            for product in flying:
                order.async_read_again(self._warp.number, product.chunks)
        self._written = frozenset[Register]().union(*(p.form.written for p in flying))
        self._read = frozenset[Register]().union(*(p.form.read for p in flying))

    def _finish(self, count: int) -> None:
        """Computes the first `count` outstanding products, except those that have been computed."""
        everything = [product for group in self._groups for product in group] + self._open
        todo = everything[self._made : count]
        self._made = max(self._made, count)
        while todo:
            same = 1
            while same < len(todo) and np.array_equal(
                todo[same].form.accumulators, todo[0].form.accumulators
            ):
                same += 1
            self._compute(todo[:same])
            todo = todo[same:]

    def _compute(self, products: list[Product]) -> None:
        """Products into the same accumulators, one after the other."""
        form, registers = products[0].form, self._warp.b32
        rows = registers[form.accumulators].view(np.float32)
        blocks = form.columns // 8
        shape = (blocks, 2, 2, 8, 4)  # column block, upper rows, column, row, column pair
        total = rows.reshape(shape).transpose(1, 3, 0, 4, 2).reshape(16, form.columns)
        for product in products:
            a, b = self._a(product), self._decoded(product.b, product.form.dtype)
            sign = np.float32(product.form.signs[0] * product.form.signs[1])
            update = matrix_product(a, b) * sign
            total = total + update if product.accumulate else update
        back = total.reshape(2, 8, blocks, 4, 2).transpose(2, 0, 4, 1, 3)
        registers[form.accumulators] = np.ascontiguousarray(back).reshape(-1, LANES).view(np.uint32)

    def _a(self, product: Product) -> np.ndarray:
        if product.a is not None:
            return self._decoded(product.a, product.form.dtype)
        words = self._warp.b32[product.form.a_registers].view(np.uint16)
        values = words.reshape(2, 2, 8, 4, 2)  # upper k, upper rows, row, k pair, k
        values = values.transpose(1, 2, 0, 3, 4).reshape(16, _K)
        return _widen(values, product.form.dtype)

    def _decoded(self, tile: Tile, dtype: str) -> np.ndarray:
        """Values of a tile; the four warps of a warpgroup share them while memory is unchanged."""
        cta = self._warp.cta
        if cta.decoded_version != cta.shared_version:
            cta.decoded_version = cta.shared_version
            cta.decoded.clear()
        values = cta.decoded.get((tile, dtype))
        if values is None:
            words = cta.shared.data[: cta.shared.data.size // 2 * 2].view(np.uint16)
            values = cta.decoded[tile, dtype] = _widen(words[tile_elements(tile)], dtype)
        return values


def _first_touching(step: Run | Single, touched: frozenset[Register]) -> Instruction:
    if isinstance(step, Single):
        return step.instruction
    return next(
        instruction
        for instruction in step.instructions
        if any(r in touched for operand in instruction.operands for r in registers(operand))
    )


def _widen(words: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "f16":
        return np.ascontiguousarray(words).view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)
