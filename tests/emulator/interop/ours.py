"""This project's Blackwell kernels on the same inputs, to be held against flash-attn-4's."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import tempfile
from typing import Any

import numpy as np

from fa4_jax.conformance.oracle import Inputs
from fa4_jax.key import POLYNOMIAL_EXP2_TILES, KernelKey, Pass, backward_value_dim
from fa4_jax.manifest import Launch
from kernels import emulator
from kernels.build import compile
from kernels.descriptions import describe, warps_of_roles
from kernels.emulator import Names, Policy, Report
from kernels.emulator.driver import arguments
from kernels.emulator.machine.trace import Trace

ARCH = "sm_100f"
_UNBOUNDED = 1 << 30
_RESCALE_THRESHOLD_LOG2 = 8.0


@dataclasses.dataclass(frozen=True)
class Ours:
    """A kernel's text, how it is launched, its warps by role, its sizes by name."""

    ptx: str
    symbol: str
    launch: Launch
    roles: dict[str, tuple[int, ...]]
    tile: dict[str, int]


def compile_forward(head_dim: int, is_causal: bool) -> Ours:
    """Compiles the bf16 forward as `fa4_jax.attention` chooses it by default."""
    polynomial = (ARCH, head_dim) in POLYNOMIAL_EXP2_TILES
    return _compile(
        KernelKey(ARCH, Pass.FORWARD, "bf16", head_dim, band=is_causal, polynomial_exp2=polynomial)
    )


def compile_backward(head_dims: tuple[int, int], is_causal: bool, deterministic: bool) -> Ours:
    """Compiles the main kernel of the bf16 backward for (head_dim, value_dim)."""
    head_dim, value_dim = head_dims
    return _compile(
        KernelKey(
            *(ARCH, Pass.BACKWARD, "bf16", head_dim),
            band=is_causal,
            deterministic=deterministic,
            value_dim=backward_value_dim(ARCH, head_dim, value_dim),
        )
    )


def _compile(key: KernelKey) -> Ours:
    """Runs in a process of its own: see compile.prepare_process."""
    compile.prepare_process(ARCH)
    cute: Any = importlib.import_module("cutlass.cute")
    from kernels import sources

    source = sources.source(key)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {ARCH} --keep-ptx --dump-dir {folder}"
        text: str = cute.compile(source.host, *source.arguments, options=options).__ptx__
    symbol = re.search(r"\.entry (\w+)", text)
    assert symbol is not None
    roles = warps_of_roles(describe(key))
    return Ours(text, symbol[1], source.launch, roles, source.tile)


def forward(
    ours: Ours, inputs: Inputs, is_causal: bool, policy: Policy, trace: Trace | None = None
) -> tuple[dict[str, np.ndarray], Report]:
    """Results by the oracle's names, and the report."""
    arrays = {"q": inputs.query, "k": inputs.key, "v": inputs.value}
    results, report = _launch(ours, arrays, is_causal, policy, trace)
    return {"output": results["o"], "lse": results["lse"]}, report


def backward(
    ours: Ours, inputs: Inputs, is_causal: bool, policy: Policy, trace: Trace | None = None
) -> Report:
    """The main kernel alone, its intermediate operands zero."""
    b, t, n, _ = inputs.query.shape
    m, width = ours.tile["m"], ours.tile["head_dim"]
    tiles = -(-t // m)
    arrays = {"q": inputs.query, "k": inputs.key, "v": inputs.value, "do": inputs.output_bar}
    arrays |= {name: np.zeros((b, n, tiles * m), np.float32) for name in ("lse_log2", "delta")}
    arrays["dq_acc"] = np.zeros((b, n, tiles, m * width), np.float32)
    arrays["dq_order"] = np.zeros((b, n, tiles), np.int32)
    arrays["dq_ticket"] = np.zeros(1, np.int32)
    return _launch(ours, arrays, is_causal, policy, trace)[1]


def _launch(
    ours: Ours,
    arrays: dict[str, np.ndarray],
    is_causal: bool,
    policy: Policy,
    trace: Trace | None,
) -> tuple[dict[str, np.ndarray], Report]:
    (b, t, _, d), keys = arrays["q"].shape, arrays["k"].shape[1]
    arrays["extents"] = np.array([[t, keys, keys - t, 0]] * b, np.int32)
    right = 0 if is_causal else _UNBOUNDED
    scale = d**-0.5
    attributes = {
        "scale": scale,
        "scale_log2": scale * math.log2(math.e),
        "rescale_threshold_log2": _RESCALE_THRESHOLD_LOG2,
        "window_left": _UNBOUNDED,
        "window_right": right,
    }
    packed = arguments.pack(ours.launch, arrays, attributes, multiprocessors=1)
    report = emulator.launch(
        ours.ptx,
        ours.symbol,
        **packed.keywords,
        policy=policy,
        names=Names(ours.roles),
        trace=trace,
    )
    return packed.results, report
