"""This project's Blackwell kernels on the same inputs, to be held against flash-attn-4's."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.grid_model import recording
from fa4_jax import bands
from fa4_jax.conformance.oracle import Inputs
from fa4_jax.key import POLYNOMIAL_EXP2_TILES, KernelKey, Pass, value_dim_tile
from fa4_jax.plan import scalars
from fa4_jax.problem import Problem, default_scale
from kernels import emulator
from kernels.build import compile
from kernels.build.compile import Ptx
from kernels.descriptions import describe, warps_of_roles
from kernels.emulator import Names, Policy, Report
from kernels.emulator.driver import arguments
from kernels.emulator.machine.trace import Trace

ARCH = "sm_100f"


@dataclasses.dataclass(frozen=True)
class Ours:
    """A compiled kernel, and its warps by role."""

    key: KernelKey
    ptx: Ptx
    roles: dict[str, tuple[int, ...]]


def compile_forward(head_dim: int, is_causal: bool) -> Ours:
    """Compiles the bf16 forward as `fa4_jax.attention` chooses it by default."""
    polynomial = (ARCH, head_dim) in POLYNOMIAL_EXP2_TILES
    return compile_key(
        KernelKey(ARCH, Pass.FORWARD, "bf16", head_dim, band=is_causal, polynomial_exp2=polynomial)
    )


def backward_key(head_dim: int, value_dim: int, **flags: bool) -> KernelKey:
    """The main kernel of the bf16 backward."""
    value_dim = value_dim_tile(ARCH, Pass.BACKWARD, head_dim, value_dim)
    return KernelKey(ARCH, Pass.BACKWARD, "bf16", head_dim, value_dim=value_dim, **flags)


def compile_key(key: KernelKey) -> Ours:
    """Runs in a process of its own: see compile.prepare_process."""
    return Ours(key, compile.compile_ptx(key), warps_of_roles(describe(key)))


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
    arrays = {"q": inputs.query, "k": inputs.key, "v": inputs.value, "do": inputs.output_bar}
    return _launch(ours, arrays, is_causal, policy, trace)[1]


def _launch(
    ours: Ours,
    arrays: dict[str, np.ndarray],
    is_causal: bool,
    policy: Policy,
    trace: Trace | None,
) -> tuple[dict[str, np.ndarray], Report]:
    """Runs a kernel; the last row is aligned with the last key."""
    (b, t, n, d), (_, s, kv_heads, value_dim) = arrays["q"].shape, arrays["v"].shape
    problem = Problem(
        *(b, t, s, n, kv_heads, d, ours.key.dtype),
        scale=default_scale(d),
        window=bands.CAUSAL if is_causal else bands.EVERYTHING,
        deterministic=ours.key.deterministic,
        value_dim=None if value_dim == d else value_dim,
    )
    arrays = recording.operands(ours.key, problem, recording.Sizes(n, t, s, s - t)) | arrays
    packed = arguments.pack(ours.ptx.launch, arrays, scalars(problem), multiprocessors=1)
    report = emulator.launch(
        ours.ptx.text,
        ours.ptx.symbol,
        **packed.keywords,
        policy=policy,
        names=Names(ours.roles),
        trace=trace,
    )
    return packed.results, report
