"""This project's Blackwell forward on the same inputs, to be held against flash-attn-4's."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import tempfile
from typing import Any

import numpy as np

from fa4_jax.conformance.oracle import Inputs
from fa4_jax.key import POLYNOMIAL_EXP2_TILES, KernelKey, Pass
from fa4_jax.manifest import Launch
from kernels import emulator
from kernels.build import compile
from kernels.emulator import Policy, Report, arguments
from kernels.emulator.trace import Trace

ARCH = "sm_100f"
_UNBOUNDED = 1 << 30
_RESCALE_THRESHOLD_LOG2 = 8.0


@dataclasses.dataclass(frozen=True)
class Ours:
    """A kernel's text, how it is launched, and its warps by role."""

    ptx: str
    symbol: str
    launch: Launch
    roles: dict[str, tuple[int, ...]]


def compile_forward(head_dim: int, is_causal: bool) -> Ours:
    """Compiles the bf16 forward as `fa4_jax.attention` chooses it by default.

    Runs in a process of its own: see compile.prepare_process.
    """
    compile.prepare_process(ARCH)
    cute: Any = importlib.import_module("cutlass.cute")
    from kernels import sources

    polynomial = (ARCH, head_dim) in POLYNOMIAL_EXP2_TILES
    key = KernelKey(
        ARCH, Pass.FORWARD, "bf16", head_dim, band=is_causal, polynomial_exp2=polynomial
    )
    source = sources.source(key)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {ARCH} --keep-ptx --dump-dir {folder}"
        text: str = cute.compile(source.host, *source.arguments, options=options).__ptx__
    symbol = re.search(r"\.entry (\w+)", text)
    assert symbol is not None
    places = importlib.import_module("kernels.sm100.forward_data").WARPS_OF_ROLE
    roles = {name: tuple(range(first, first + n)) for name, (first, n) in places.items()}
    return Ours(text, symbol[1], source.launch, roles)


def forward(
    ours: Ours, inputs: Inputs, is_causal: bool, policy: Policy, trace: Trace | None = None
) -> tuple[dict[str, np.ndarray], Report]:
    """Results by the oracle's names, and the report."""
    b, t, _, d = inputs.query.shape
    offset = inputs.key.shape[1] - t
    extents = np.array([[t, inputs.key.shape[1], offset, 0]] * b, np.int32)
    right = 0 if is_causal else _UNBOUNDED
    scale = d**-0.5
    attributes = {
        "scale": scale,
        "scale_log2": scale * math.log2(math.e),
        "rescale_threshold_log2": _RESCALE_THRESHOLD_LOG2,
        "window_left": _UNBOUNDED,
        "window_right": right,
    }
    arrays = {"q": inputs.query, "k": inputs.key, "v": inputs.value, "extents": extents}
    packed = arguments.pack(ours.launch, arrays, attributes, multiprocessors=1)
    report = emulator.launch(
        ours.ptx,
        ours.symbol,
        grid=packed.grid,
        block=ours.launch.block,
        cluster=ours.launch.cluster,
        dynamic_smem=ours.launch.dynamic_smem_bytes,
        params=packed.params,
        memory=packed.memory,
        policy=policy,
        roles=ours.roles,
        trace=trace,
    )
    return {"output": packed.results["o"], "lse": packed.results["lse"]}, report
