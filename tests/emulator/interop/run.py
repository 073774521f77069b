"""Runs a compiled kernel on the emulator and compares with the float64 oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import Inputs, oracle
from kernels import emulator
from kernels.emulator import Names, Policy, Report
from kernels.emulator.machine.trace import Trace
from kernels.emulator.memory import uninitialised
from tests.emulator.interop.flash_attn4 import Step
from tests.emulator.interop.host_code import Compiled, Tensor, host_code

_FIRST_ADDRESS = 0x1_0000_0000
_GAP = 1 << 20
_TILE = 128


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of one attention call, and of its inputs.

    Attributes:
      growing: keys grow along the sequence, so that row maxima do and the rescale is run.
    """

    query_length: int
    key_length: int
    batch: int = 1
    heads: int = 1
    growing: bool = False


def make_inputs(problem: Problem, head_dim: int, head_dim_v: int, seed: int = 0) -> Inputs:
    """Random bf16 inputs [B, T, N, H]; the cotangents have the shapes of the results."""
    rng = np.random.default_rng(seed)
    rows = (problem.batch, problem.query_length, problem.heads)
    keys = (problem.batch, problem.key_length, problem.heads)
    query, key = rng.normal(size=(*rows, head_dim)), rng.normal(size=(*keys, head_dim))
    if problem.growing:
        query = np.abs(query)
        key += np.linspace(0, 4, problem.key_length)[None, :, None, None]
    value, output_bar = rng.normal(size=(*keys, head_dim_v)), rng.normal(size=(*rows, head_dim_v))
    lse_bar = np.zeros((problem.batch, problem.heads, problem.query_length), np.float32)
    query, key, value, output_bar = (
        x.astype(ml_dtypes.bfloat16) for x in (query, key, value, output_bar)
    )
    return Inputs(query, key, value, output_bar, lse_bar)


def place(arrays: dict[str, np.ndarray]) -> tuple[dict[str, Tensor], dict[int, np.ndarray]]:
    """Addresses for arrays far apart: arguments by name, and the memory of a launch."""
    tensors, memory, address = {}, {}, _FIRST_ADDRESS
    for name, array in arrays.items():
        tensors[name] = Tensor.of(address, array)
        memory[address] = array.reshape(-1).view(np.uint8)
        address += -(-array.nbytes // _GAP) * _GAP + _GAP
    return tensors, memory


def fresh(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An array of NaN patterns."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return uninitialised(size).view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a forward gave.

    Attributes:
      output: [B, T, N, H].
      lse: [B, N, T].
    """

    output: np.ndarray
    lse: np.ndarray
    report: Report


@dataclasses.dataclass(frozen=True)
class Run:
    """How a launch is emulated; see emulator.launch."""

    policy: Policy
    seed: int = 0
    trace: Trace | None = None
    roles: dict[str, tuple[int, ...]] | None = None


def forward(compiled: Compiled, inputs: Inputs, how: Run) -> Outcome:
    """Output and LSE of a forward kernel."""
    b, t, n, d = inputs.query.shape
    output = fresh((b, t, n, inputs.value.shape[-1]), ml_dtypes.bfloat16)
    lse = fresh((b, n, t), np.float32)
    arrays = {"q": inputs.query, "k": inputs.key, "v": inputs.value, "o": output, "lse": lse}
    return Outcome(output, lse, _launch(compiled, arrays, d**-0.5, how))


def backward(
    steps: Sequence[Step], inputs: Inputs, output: np.ndarray, lse: np.ndarray, policy: Policy
) -> dict[str, np.ndarray]:
    """dq, dk and dv by what flash_attn4.compile_backward compiles.

    `output` [B, T, N, H] and `lse` [B, N, T] are the forward's.
    """
    arrays = _of_backward(inputs, lambda shape: fresh(shape, np.float32))
    arrays |= {"o": output.astype(ml_dtypes.bfloat16), "lse": lse.astype(np.float32)}
    scale = inputs.query.shape[-1] ** -0.5
    for step in steps:
        _launch(step.code, {name: arrays[name] for name in step.names}, scale, Run(policy))
    return {name: arrays[name] for name in ("dq", "dk", "dv")}


def backward_main(step: Step, inputs: Inputs, how: Run) -> Report:
    """A main kernel of a backward alone, its intermediate operands zero."""
    arrays = _of_backward(inputs, lambda shape: np.zeros(shape, np.float32))
    scale = inputs.query.shape[-1] ** -0.5
    return _launch(step.code, {name: arrays[name] for name in step.names}, scale, how)


def _of_backward(
    inputs: Inputs, intermediate: Callable[[tuple[int, ...]], np.ndarray]
) -> dict[str, np.ndarray]:
    """Operands, intermediate results and gradients by name."""
    b, t, n, d = inputs.query.shape
    rounded = -(-t // _TILE) * _TILE
    return {
        "q": inputs.query,
        "k": inputs.key,
        "v": inputs.value,
        "do": inputs.output_bar,
        "lse_log2": intermediate((b, n, rounded)),
        "row_sums": intermediate((b, n, rounded)),
        "dq_sums": intermediate((b, n, rounded * d)),
        "dq": fresh(inputs.query.shape, ml_dtypes.bfloat16),
        "dk": fresh(inputs.key.shape, ml_dtypes.bfloat16),
        "dv": fresh(inputs.value.shape, ml_dtypes.bfloat16),
    }


def _launch(compiled: Compiled, arrays: dict[str, np.ndarray], scale: float, how: Run) -> Report:
    """Launches a kernel as its own host code does."""
    tensors, memory = place(arrays)
    launch = host_code(compiled).launch([*tensors.values(), scale, None])
    return emulator.launch(
        compiled.ptx,
        launch.symbol,
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        dynamic_smem=launch.dynamic_smem_bytes,
        params=launch.params,
        memory=memory,
        policy=how.policy,
        seed=how.seed,
        trace=how.trace,
        names=None if how.roles is None else Names(how.roles),
    )


def expected(problem: Problem, inputs: Inputs, is_causal: bool) -> dict[str, np.ndarray]:
    """The oracle's results; the causal diagonal ends in the lower right corner."""
    case = Case(
        head_dim=inputs.query.shape[-1],
        batch=problem.batch,
        heads=(problem.heads, problem.heads),
        query_length=problem.query_length,
        key_length=problem.key_length,
        is_causal=is_causal,
        query_offset=problem.key_length - problem.query_length,
    )
    return oracle(case, inputs)


def relative_error(actual: np.ndarray, wanted: np.ndarray) -> float:
    """|actual - wanted| / |wanted| in the Euclidean norm; infinities must be at the same places."""
    finite = np.isfinite(wanted)
    if not np.array_equal(np.asarray(actual[~finite], np.float64), wanted[~finite]):
        return float("inf")
    difference = actual[finite].astype(np.float64) - wanted[finite]
    error = float(np.linalg.norm(difference) / np.linalg.norm(wanted[finite]))
    return error if np.isfinite(error) else float("inf")
