"""Small CuTe-DSL programs for sm_100, compiled to PTX in a process of their own."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import multiprocessing
import os
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor

import ml_dtypes
import numpy as np

from kernels import emulator
from kernels.emulator import Policy
from kernels.emulator.tensor_map import TensorMap, encode

BF16 = np.dtype(ml_dtypes.bfloat16)
_OPERANDS, _GAP, _RESULT = 0x10_0000, 0x10_0000, 0x80_0000


@dataclasses.dataclass(frozen=True)
class Program:
    """A source of tests/emulator/sm100 and what is fixed when it is compiled.

    Attributes:
      boxes: box of each operand's tensor map, contiguous dimension first; all are 64 wide.
      result: shape of the float32 result.
      cluster: CTAs, which are also the grid.
    """

    source: str
    arguments: tuple[int, ...]
    boxes: tuple[tuple[int, int], ...]
    result: tuple[int, int]
    cluster: int = 1


GEMM = Program("gemm", (128, 192), ((64, 128), (64, 128)), (128, 128))
"""C (128 x 128) = A (128 x 192) B^T."""
CHAIN = Program("chain", (3,), ((64, 128), (64, 64), (64, 64)), (128, 64))
"""O = (Q K^T) V of 128 rows and 3 blocks of 64 keys, P from tensor memory."""
PAIR = Program("pair", (128, 192), ((64, 128), (64, 64)), (256, 128), cluster=2)
"""C (256 x 128) = A (256 x 192) B^T by a pair of CTAs."""


@functools.cache
def ptx(program: Program) -> str:
    """The text of a program."""
    return _compiler().submit(_compile, program.source, program.arguments).result()


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def close() -> None:
    """Ends the compiling process, if there is one."""
    if _compiler.cache_info().currsize:
        _compiler().shutdown()
        _compiler.cache_clear()


def launch(
    program: Program, operands: list[np.ndarray], policy: Policy, seed: int, text: str | None = None
) -> np.ndarray:
    """The result of one launch; `text` may replace the program's."""
    text = ptx(program) if text is None else text
    result = np.full(program.result, np.nan, np.float32)
    memory, maps = {_RESULT: result.view(np.uint8)}, []
    for i, (operand, box) in enumerate(zip(operands, program.boxes, strict=True)):
        address, (rows, width) = _OPERANDS + i * _GAP, operand.shape
        memory[address] = operand.view(np.uint8)
        tensor = TensorMap(address, "bf16", (width, rows), (2 * width,), box, swizzle_bytes=128)
        maps.append(encode(tensor))
    entry = re.search(r"\.entry (\w+)", text)
    assert entry is not None
    emulator.launch(
        text,
        entry[1],
        grid=(program.cluster, 1, 1),
        block=(160, 1, 1),
        cluster=(program.cluster, 1, 1),
        dynamic_smem=100_000,
        params=[*maps, _RESULT.to_bytes(8, "little")],
        memory=memory,
        policy=policy,
        seed=seed,
    )
    return result


def _compile(source: str, arguments: tuple[int, ...]) -> str:
    os.environ["CUTE_DSL_ARCH"] = "sm_100a"
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    import cutlass.cute as cute

    module = importlib.import_module(f"tests.emulator.sm100.{source}")
    kernel, placeholders = module.program(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {folder}"
        return cute.compile(kernel, *placeholders, options=options).__ptx__
