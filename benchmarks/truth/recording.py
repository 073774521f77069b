"""One CTA of a kernel of the project on the emulator, recorded for a timing estimate."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from fa4_jax.key import KernelKey, Pass
from fa4_jax.manifest import Cubin, Launch
from kernels import emulator
from kernels.build import cache
from kernels.common import bands
from kernels.emulator import Policy
from kernels.emulator.driver import arguments
from kernels.emulator.machine.trace import Trace

ROWS_OF_BACKWARD = 64
_STORAGE: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@dataclasses.dataclass(frozen=True)
class Code:
    """What of a compiled kernel an estimate needs.

    Attributes:
      registers: per thread, as the CTA starts.
      tile: sizes by name, as in the manifest.
    """

    key: KernelKey
    text: str
    symbol: str
    launch: Launch
    registers: int
    tile: dict[str, int]


def built(key: KernelKey) -> Code:
    """A kernel that `python -m kernels.build` has compiled.

    Raises:
      FileNotFoundError: it has not, or not from the present sources.
    """
    entry = cache.find(key)
    if entry is None:
        raise FileNotFoundError(f"{key.name}: run python -m kernels.build first")
    cubin: Cubin = entry.cubin
    return Code(key, entry.ptx, cubin.symbol, cubin.launch, cubin.registers, cubin.tile)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Attention of one batch element with as many key heads as query heads.

    Attributes:
      offset: of the first query, where the mask is causal.
    """

    heads: int
    query_length: int
    key_length: int
    offset: int = 0


def record(code: Code, problem: Problem, ctas: int = 1) -> Trace:
    """Runs a kernel on one multiprocessor, or cluster, and records its first CTAs or clusters.

    The operands are normal, the intermediate ones zero: no kernel's path depends on those.
    """
    key = code.key
    packed = arguments.pack(
        code.launch, _operands(key, code, problem), _attributes(key), multiprocessors=1
    )
    trace = Trace(frozenset(range(ctas * code.launch.cluster[0])))
    emulator.launch(
        code.text,
        code.symbol,
        **packed.keywords,
        policy=Policy(races=False),
        trace=trace,
    )
    return trace


def _attributes(key: KernelKey) -> dict[str, float]:
    scale = key.head_dim**-0.5
    return {
        "scale_log2": scale * math.log2(math.e),
        "scale": scale,
        "rescale_threshold_log2": 8.0,
        "window_left": bands.UNBOUNDED,
        "window_right": 0 if key.band else bands.UNBOUNDED,
    }


def _operands(key: KernelKey, code: Code, problem: Problem) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heads, t, s, d = problem.heads, problem.query_length, problem.key_length, key.head_dim
    shapes = {"q": (t, d), "k": (s, d)}
    shapes |= {name: (length, key.value_dim) for name, length in (("v", s), ("o", t), ("do", t))}
    arrays = {
        name: rng.normal(size=(1, length, heads, width)).astype(_STORAGE[key.dtype])
        for name, (length, width) in shapes.items()
    }
    arrays["extents"] = np.array([[t, s, problem.offset, 0]], np.int32)
    arrays |= {name: np.zeros((1, heads, t), np.float32) for name in ("lse", "dlse")}
    if key.kernel in (Pass.BACKWARD, Pass.BACKWARD_POST):
        m, width = code.tile["m"], code.tile.get("head_dim", d)
        tiles = -(-t // m)
        arrays |= {
            name: np.zeros((1, heads, tiles * m), np.float32) for name in ("lse_log2", "delta")
        }
        arrays["dq_acc"] = np.zeros((1, heads, tiles, m * width), np.float32)
        arrays["dq_order"] = np.zeros((1, heads, tiles), np.int32)
        arrays["dq_ticket"] = np.zeros(1, np.int32)
    return {name: arrays[name] for name in code.launch.operands}
