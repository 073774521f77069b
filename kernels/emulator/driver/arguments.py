"""A manifest's Launch and numpy arrays -> what `launch` takes: the handler's work, in Python."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from fa4_jax.manifest import Launch, Param, evaluate_size
from kernels.emulator import tensor_map
from kernels.emulator.memory import uninitialised

DTYPES: dict[str, Any] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "i32": np.dtype(np.int32),
}
_FIRST_ADDRESS = 0x1_0000_0000
_GAP = 1 << 20


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Everything about a launch but the code.

    Attributes:
      launch: the manifest's.
      results: the arrays that the kernel writes, by name; views of `memory`.
    """

    launch: Launch
    grid: tuple[int, int, int]
    params: tuple[bytes, ...]
    memory: dict[int, np.ndarray]
    results: dict[str, np.ndarray]

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of `kernels.emulator.launch` after the text and the kernel's name."""
        return {
            "grid": self.grid,
            "block": self.launch.block,
            "cluster": self.launch.cluster,
            "dynamic_smem": self.launch.dynamic_smem_bytes,
            "params": self.params,
            "memory": self.memory,
        }


def pack(
    launch: Launch,
    operands: Mapping[str, np.ndarray],
    attributes: Mapping[str, float],
    multiprocessors: int,
) -> Arguments:
    """Places copies of the operands and fresh results in memory and packs every parameter.

    Results that share an operand's name start as that operand, those that the handler zeroes as
    zeros, others as NaN patterns.
    `multiprocessors` is the device's number of them, which a persistent kernel's grid depends on.
    """
    shapes = {name: operands[name].shape for name in launch.operands}
    arrays = {name: _placed(operands[name]) for name in launch.operands}
    for result in launch.results:
        shape = tuple(evaluate_size(size, shapes) for size in result.shape)
        if result.name not in arrays:
            dtype = DTYPES[result.dtype]
            size = int(np.prod(shape)) * dtype.itemsize
            fresh = np.zeros(size, np.uint8) if result.zeroed else uninitialised(size)
            arrays[result.name] = fresh.view(dtype).reshape(shape)
    addresses, memory, address = {}, {}, _FIRST_ADDRESS
    for name, array in arrays.items():
        addresses[name], memory[address] = address, array.reshape(-1).view(np.uint8)
        address += -(-array.nbytes // _GAP) * _GAP + _GAP
    values = _Values(arrays, addresses, shapes, attributes, multiprocessors)
    grid = tuple(evaluate_size(size, shapes) for size in launch.grid)
    if launch.persistent:
        clusters = max(multiprocessors * launch.persistent // launch.cluster[0], 1)
        grid = (min(grid[0], clusters * launch.cluster[0]), *grid[1:])
    return Arguments(
        launch,
        (grid[0], grid[1], grid[2]),
        tuple(values.bytes_of(param) for param in launch.params),
        memory,
        {result.name: arrays[result.name] for result in launch.results},
    )


def _placed(array: np.ndarray) -> np.ndarray:
    return np.array(array, order="C")


@dataclasses.dataclass(frozen=True)
class _Values:
    arrays: dict[str, np.ndarray]
    addresses: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    attributes: Mapping[str, float]
    multiprocessors: int

    def bytes_of(self, param: Param) -> bytes:
        """The bytes of one parameter."""
        if param.kind == "tensor_map":
            return self._tensor_map(param)
        if param.kind == "pointer":
            return struct.pack("<Q", self.addresses[param.buffer])
        if param.kind == "f32":
            return struct.pack("<f", self.attributes[param.name])
        if param.kind == "dim":
            return struct.pack("<i", self.arrays[param.buffer].shape[param.axes[0]])
        if param.kind == "size":
            return struct.pack("<i", evaluate_size(param.size, self.shapes))
        if param.kind == "sm_count":
            return struct.pack("<i", self.multiprocessors)
        return struct.pack("<i", int(self.attributes[param.name]))

    def _tensor_map(self, param: Param) -> bytes:
        array = self.arrays[param.buffer]
        names = {dtype: name for name, dtype in DTYPES.items()}
        last = sum((array.shape[axis] - 1) * array.strides[axis] for axis in param.axes)
        return tensor_map.encode(
            tensor_map.TensorMap(
                address=self.addresses[param.buffer],
                dtype=names[array.dtype],
                sizes=tuple(array.shape[axis] for axis in param.axes),
                byte_strides=tuple(array.strides[axis] for axis in param.axes[1:]),
                box=param.box,
                swizzle_bytes=param.swizzle_bytes,
                large=last + array.itemsize >= 128 * 1024,
            )
        )
