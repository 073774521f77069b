"""Small CuTe-DSL programs for sm_100, compiled to PTX in a process of their own.

C (128 x n, float32) = A (128 x k) B^T (n x k): TMA loads, tcgen05.mma into tensor memory, loads
from there, stores to global memory. One warp loads and multiplies, four write the result.
"""

from __future__ import annotations

import dataclasses
import functools
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

ROWS, BLOCK_K = 128, 64
BF16 = np.dtype(ml_dtypes.bfloat16)
_A, _B, _C = 0x10_0000, 0x20_0000, 0x40_0000


@dataclasses.dataclass(frozen=True)
class Gemm:
    """What is fixed when it is compiled; A comes from `source`: shared or tensor memory."""

    columns: int = 128
    depth: int = 192
    source: str = "shared"


@functools.cache
def ptx(gemm: Gemm) -> str:
    """The text of a program."""
    return _compiler().submit(_compile, gemm).result()


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def close() -> None:
    """Ends the compiling process, if there is one."""
    if _compiler.cache_info().currsize:
        _compiler().shutdown()
        _compiler.cache_clear()


def run(gemm: Gemm, a: np.ndarray, b: np.ndarray, policy: Policy, seed: int) -> np.ndarray:
    """C of one launch; a: (128, depth), b: (columns, depth) bfloat16."""
    text = ptx(gemm)
    return launch(text, gemm, a, b, policy, seed)


def launch(
    text: str, gemm: Gemm, a: np.ndarray, b: np.ndarray, policy: Policy, seed: int
) -> np.ndarray:
    """The same of a given text."""
    c = np.zeros((ROWS, gemm.columns), np.float32)
    maps = [_map(address, gemm.depth, rows) for address, rows in ((_A, ROWS), (_B, gemm.columns))]
    entry = re.search(r"\.entry (\w+)", text)
    assert entry is not None
    emulator.launch(
        text,
        entry[1],
        grid=(1, 1, 1),
        block=(160, 1, 1),
        dynamic_smem=100_000,
        params=[*maps, _C.to_bytes(8, "little")],
        memory={_A: a.view(np.uint8), _B: b.view(np.uint8), _C: c},
        policy=policy,
        seed=seed,
    )
    return c


def _map(address: int, depth: int, rows: int) -> bytes:
    tensor = TensorMap(
        address, "bf16", (depth, rows), (2 * depth,), (BLOCK_K, rows), swizzle_bytes=128
    )
    return encode(tensor)


def _compile(gemm: Gemm) -> str:
    os.environ["CUTE_DSL_ARCH"] = "sm_100a"
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    import cutlass.cute as cute

    from tests.emulator.sm100 import gemm as source

    kernel, arguments = source.program(gemm.columns, gemm.depth, gemm.source)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {folder}"
        return cute.compile(kernel, *arguments, options=options).__ptx__
