"""Packs manifest entries into the plain tables that the FFI library takes (ffi/kernel_record.h).

Works on manifest.json's own form and with `struct`, not on objects and with ctypes: this runs
whenever the package is imported.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import struct
from typing import Any

ABI_VERSION = 5

_PARAM_KINDS = ("tensor_map", "pointer", "dim", "size", "i32", "f32", "sm_count")

_RANGE = struct.Struct("=2i")
_FACTOR = struct.Struct("=q4i")
_PARAM = struct.Struct("=5i5i5i2i")
_BUFFER = struct.Struct("=3i2ii")
_KERNEL = struct.Struct("=7i2i2i6i3I3I3I")


class Records(ctypes.Structure):
    """All tables with their lengths."""

    _fields_ = (
        ("strings", ctypes.c_char_p),
        ("kernels", ctypes.c_char_p),
        ("buffers", ctypes.c_char_p),
        ("params", ctypes.c_char_p),
        ("sizes", ctypes.c_char_p),
        ("factors", ctypes.c_char_p),
        ("num_string_bytes", ctypes.c_int32),
        ("num_kernels", ctypes.c_int32),
        ("num_buffers", ctypes.c_int32),
        ("num_params", ctypes.c_int32),
        ("num_sizes", ctypes.c_int32),
        ("num_factors", ctypes.c_int32),
    )


class Packer:
    """Collects kernels, then hands out their records."""

    def __init__(self) -> None:
        self._strings = bytearray()
        self._offsets: dict[str, int] = {}
        self._kernels: list[bytes] = []
        self._buffers: list[bytes] = []
        self._params: list[bytes] = []
        self._sizes: list[bytes] = []
        self._factors: list[bytes] = []

    def add(self, entry: dict[str, Any], directory: pathlib.Path) -> None:
        """Adds an entry of manifest.json whose file lies in `directory`."""
        key, launch = entry["key"], entry["launch"]
        operands, results, params = launch["operands"], launch["results"], launch["params"]
        index: dict[str, int] = {}
        for position, name in enumerate((*operands, *(result["name"] for result in results))):
            # A result that aliases an operand has its shape and memory: either index will do.
            index.setdefault(name, position)
        first_buffer, first_param = len(self._buffers), len(self._params)
        for name in operands:
            self._buffers.append(_BUFFER.pack(self._string(name), self._string(""), -1, 0, 0, 0))
        for result in results:
            self._add_result(result, operands, index)
        for param in params:
            self._add_param(param, index)
        grid = (bound for size in launch["grid"] for bound in self._size(size, index))
        record = _KERNEL.pack(
            self._string(entry["name"]),
            self._string(key["arch"]),
            self._string(key["dtype"]),
            self._string(os.path.join(directory, entry["file"])),
            self._string(entry["sha256"]),
            self._string(entry["symbol"]),
            len(operands),
            *(first_buffer, len(self._buffers), first_param, len(self._params)),
            *grid,
            *launch["block"],
            *launch["cluster"],
            launch["dynamic_smem_bytes"],
            launch["persistent"],
            launch["programmatic"],
        )
        self._kernels.append(record)

    def records(self) -> Records:
        """The tables of all kernels added so far."""
        tables = (self._kernels, self._buffers, self._params, self._sizes, self._factors)
        return Records(
            bytes(self._strings),
            *(b"".join(table) for table in tables),
            len(self._strings),
            *(len(table) for table in tables),
        )

    def _string(self, text: str) -> int:
        offset = self._offsets.get(text)
        if offset is None:
            offset = self._offsets[text] = len(self._strings)
            self._strings += os.fsencode(text) + b"\0"
        return offset

    def _add_result(
        self, result: dict[str, Any], operands: list[str], index: dict[str, int]
    ) -> None:
        name = result["name"]
        ranges = [_RANGE.pack(*self._size(size, index)) for size in result["shape"]]
        shape = (len(self._sizes), len(self._sizes) + len(ranges))
        self._sizes += ranges
        alias = operands.index(name) if name in operands else -1
        dtype, zeroed = self._string(result["dtype"]), result.get("zeroed", False)
        self._buffers.append(_BUFFER.pack(self._string(name), dtype, alias, *shape, zeroed))

    def _add_param(self, param: dict[str, Any], index: dict[str, int]) -> None:
        axes, box = param.get("axes", ()), param.get("box", ())
        record = _PARAM.pack(
            self._string(param["name"]),
            _PARAM_KINDS.index(param["kind"]),
            index[param["buffer"]] if "buffer" in param else -1,
            len(axes),
            param.get("swizzle_bytes", 0),
            *axes,
            *_ZEROS[len(axes) :],
            *box,
            *_ZEROS[len(box) :],
            *self._size(param.get("size", ()), index),
        )
        self._params.append(record)

    def _size(self, size: Any, index: dict[str, int]) -> tuple[int, int]:
        """Adds a product of factors, returns its range."""
        begin = len(self._factors)
        for factor in size:
            get = factor.get
            buffer = index[factor["buffer"]] if "buffer" in factor else -1
            numbers = (buffer, get("axis", 0), get("divisor", 1), get("multiple", 1))
            self._factors.append(_FACTOR.pack(get("constant", 1), *numbers))
        return begin, len(self._factors)


_ZEROS = (0,) * 5
