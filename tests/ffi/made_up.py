"""A made-up kernel for the handler's tests: it has every kind of parameter, and its code never
runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from typing import Any

from fa4_jax.key import KernelKey, Pass
from fa4_jax.manifest import Cubin, Factor, Launch, Param, Result
from tests.ffi.stand_in import Array, Call

KEY = KernelKey("sm_90a", Pass.FORWARD, "bf16", 64)
SYMBOL = "made_up_0"
CODE = b"\x7fELF and nothing else"

_ROWS = (Factor(buffer="x", axis=0, divisor=16, multiple=16),)

LAUNCH = Launch(
    operands=("x", "table", "sums"),
    results=(
        Result("y", "bf16", ((Factor(buffer="x"),), (Factor(buffer="x", axis=1),))),
        Result("padded", "f32", (_ROWS, (Factor(constant=3),))),
        Result("sums", "f32", ((Factor(buffer="sums"),),)),
    ),
    params=(
        Param("x_map", "tensor_map", "x", axes=(1, 0), box=(64, 16), swizzle_bytes=128),
        Param("y", "pointer", "y"),
        Param("sums", "pointer", "sums"),
        Param("padded_map", "tensor_map", "padded", axes=(0,), box=(8,)),
        Param("columns", "dim", "x", axes=(1,)),
        Param("padded_rows", "size", size=_ROWS),
        Param("window", "i32"),
        Param("scale", "f32"),
        Param("processors", "sm_count"),
    ),
    grid=(
        (Factor(buffer="x", axis=0, divisor=16), Factor(buffer="table")),
        (Factor(constant=2),),
        (Factor(),),
    ),
    block=(384, 1, 1),
    dynamic_smem_bytes=102_400,
    cluster=(2, 1, 1),
)

PARAM_BYTES = (128, 8, 8, 128, 4, 4, 4, 4, 4)

OPERANDS = (Array("bf16", (40, 72)), Array("i32", (3, 4)), Array("f32", (5,)))

ATTRIBUTES = {"kernel": KEY.name, "window": -7, "scale": 0.125}


AFTER_KEY = dataclasses.replace(KEY, kernel=Pass.TANGENT)
AFTER_LAUNCH = Launch(
    operands=("table", "y", "padded", "late"),
    results=(
        Result("padded", "f32", tuple((Factor(buffer="padded", axis=i),) for i in range(2))),
        Result("z", "f32", ((Factor(buffer="padded", axis=1),),)),
    ),
    params=tuple(Param(name, "pointer", name) for name in ("table", "y", "padded", "late", "z")),
    grid=((Factor(buffer="late"),), (Factor(),), (Factor(),)),
    block=(128, 1, 1),
    dynamic_smem_bytes=0,
    programmatic=True,
)
"""Of a kernel that reads and overwrites results of the other one, and has others of its own."""

LATE = Array("i32", (7,))


def cubin(directory: pathlib.Path, code: bytes = CODE, **fields: Any) -> Cubin:
    """Returns the kernel's manifest record, some fields replaced; its file is written to
    `directory`.
    """
    usual = Cubin(
        key=KEY,
        launch=LAUNCH,
        symbol=SYMBOL,
        file="made_up.cubin",
        sha256=hashlib.sha256(code).hexdigest(),
        registers=168,
        spill_bytes=0,
        tile={},
    )
    (directory / usual.file).write_bytes(code)
    return dataclasses.replace(usual, **fields)


def call(directory: pathlib.Path, record: Cubin | None = None, **fields: Any) -> Call:
    """Returns a call of the kernel with some fields replaced."""
    usual = Call(record or cubin(directory), directory, PARAM_BYTES, OPERANDS, dict(ATTRIBUTES))
    return dataclasses.replace(usual, **fields)


def calls_together(directory: pathlib.Path) -> list[Call]:
    """Returns calls of both kernels, to be launched in one."""
    record = cubin(directory, key=AFTER_KEY, launch=AFTER_LAUNCH, symbol="made_up_1")
    results = (Array("bf16", (40, 72)), Array("f32", (48, 3)))
    second = Call(record, directory, (8,) * 5, (OPERANDS[1], *results, LATE), {})
    return [call(directory), second]
