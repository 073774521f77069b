"""Reads what a cubin says about its kernels: symbol, registers, local memory, parameters.

A cubin is an ELF file. Per kernel it holds the code in `.text.<symbol>` and attributes in
`.nv.info.<symbol>` and `.nv.info`; the attribute numbers are those that `cuobjdump -elf` prints.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11
_PARAMETER = 0x17
_REQUIRED_BLOCK = 0x10

_SIZED_ATTRIBUTE = 4  # the other attribute formats hold their value in two bytes

_LOCAL_LOAD = 0x983  # LDL
_LOCAL_STORE = 0x387  # STL


@dataclasses.dataclass(frozen=True)
class Section:
    """An ELF section."""

    name: str
    kind: int
    data: bytes
    link: int


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """Resources and parameters of one kernel.

    Attributes:
      symbol: its name in the cubin.
      registers: at launch, per thread (setmaxnreg changes them later).
      stack_bytes: local memory per thread, which is where spilled registers go.
      local_accesses: instructions that load or store local memory.
      param_bytes: size of each parameter, in order.
      block: the block size that the kernel requires, or None.
    """

    symbol: str
    registers: int
    stack_bytes: int
    local_accesses: int
    param_bytes: tuple[int, ...]
    block: tuple[int, int, int] | None


def read(cubin: bytes) -> dict[str, KernelInfo]:
    """Returns the kernels of a cubin, by symbol.

    Raises:
      ValueError: this is no 64-bit ELF file.
    """
    sections = _sections(cubin)
    by_name = {section.name: section for section in sections}
    symbols = _symbols(sections)
    of_kernels: dict[tuple[int, str], int] = {}
    for attribute, value in _attributes(by_name[".nv.info"].data):
        if attribute in (_REGISTER_COUNT, _FRAME_SIZE):
            index, number = struct.unpack("<II", value)
            of_kernels[attribute, symbols[index]] = number
    return {
        name: _kernel(name, by_name, of_kernels)
        for name in (s.name.removeprefix(".text.") for s in sections if s.name.startswith(".text."))
    }


def _kernel(
    symbol: str, sections: dict[str, Section], of_kernels: dict[tuple[int, str], int]
) -> KernelInfo:
    params: dict[int, int] = {}
    block = None
    for attribute, value in _attributes(sections[f".nv.info.{symbol}"].data):
        if attribute == _PARAMETER:
            _, ordinal, _, flags = struct.unpack("<IHHI", value)
            params[ordinal] = flags >> 18
        elif attribute == _REQUIRED_BLOCK:
            block = struct.unpack("<III", value)
    return KernelInfo(
        symbol=symbol,
        registers=of_kernels[_REGISTER_COUNT, symbol],
        stack_bytes=of_kernels.get((_FRAME_SIZE, symbol), 0),
        local_accesses=_local_accesses(sections[f".text.{symbol}"].data),
        param_bytes=tuple(params[i] for i in sorted(params)),
        block=block,
    )


def instructions(cubin: bytes, symbol: str) -> list[tuple[int, int]]:
    """Returns a kernel's machine code: lower and upper 64 bits of each instruction.

    Raises:
      ValueError: this is no 64-bit ELF file.
    """
    code = next(s.data for s in _sections(cubin) if s.name == f".text.{symbol}")
    return list(struct.iter_unpack("<QQ", code))


def opcode(instruction: tuple[int, int]) -> int:
    """Returns which instruction it is, with the kind of its second operand."""
    return instruction[0] & 0xFFF


def _local_accesses(code: bytes) -> int:
    opcodes = map(opcode, struct.iter_unpack("<QQ", code))
    return sum(number in (_LOCAL_LOAD, _LOCAL_STORE) for number in opcodes)


def _sections(cubin: bytes) -> list[Section]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: no 64-bit ELF header")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)
    ]
    names = headers[names_index][4]
    return [
        Section(_string(cubin, names + h[0]), h[1], cubin[h[4] : h[4] + h[5]], h[6])
        for h in headers
    ]


def _symbols(sections: list[Section]) -> list[str]:
    table = next(section for section in sections if section.name == ".symtab")
    strings = sections[table.link].data
    return [_string(strings, entry[0]) for entry in struct.iter_unpack("<IBBHQQ", table.data)]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, position)
        end = position + 4 + (size if form == _SIZED_ATTRIBUTE else 0)
        yield attribute, data[position + 4 : end]
        position = end


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
