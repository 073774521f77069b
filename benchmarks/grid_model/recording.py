"""Records one CTA of a kernel of the project on the emulator, for a timing estimate."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from fa4_jax import bands, designs, tail
from fa4_jax.key import KernelKey
from fa4_jax.manifest import Cubin, Launch
from fa4_jax.masks.table import TILE_ROWS
from fa4_jax.plan import given_shapes, kernel_keys, new_buffers, scalars
from fa4_jax.problem import Problem, default_scale
from kernels import emulator
from kernels.build import cache
from kernels.common.launches import launch
from kernels.descriptions import describe
from kernels.emulator import Policy
from kernels.emulator.driver import arguments
from kernels.emulator.driver.arguments import DTYPES
from kernels.emulator.machine.trace import Trace

Hidden = Literal["nothing", "limits", "tags"]

PAGE = 64
"""Keys of a page, for kernels that read pages."""


@dataclasses.dataclass(frozen=True)
class Code:
    """What an estimate needs of a compiled kernel.

    Attributes:
      registers: registers of a thread, as the CTA starts.
      tile: sizes by name, as in the manifest.
    """

    key: KernelKey
    text: str
    symbol: str
    launch: Launch
    registers: int
    tile: dict[str, int]


def built(key: KernelKey) -> Code:
    """Returns a kernel that `python -m kernels.build` has compiled.

    Raises:
      FileNotFoundError: it has not compiled it, or from older sources.
    """
    entry = cache.find(key)
    if entry is None:
        raise FileNotFoundError(f"{key.name}: run python -m kernels.build first")
    cubin: Cubin = entry.cubin
    return Code(key, entry.ptx, cubin.symbol, cubin.launch, cubin.registers, cubin.tile)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of attention of one batch element with as many key heads as query heads.

    Attributes:
      offset: position of the first query among the keys, where the mask is causal.
      hidden: what ranges in memory hide in every block of the first key tile, for a kernel that has
        them: nothing; the first key, by limits; or nothing, but the tags have to be compared.
      soft_cap: of the scores, for a kernel that reads one; 0 is none.
    """

    heads: int
    query_length: int
    key_length: int
    offset: int = 0
    hidden: Hidden = "nothing"
    soft_cap: float = 0.0


def problem_of(key: KernelKey, sizes: Sizes) -> Problem:
    """Returns the attention whose part a kernel computes: its types, head dims and kind of mask."""
    return Problem(
        batch=1,
        query_length=sizes.query_length,
        key_length=sizes.key_length,
        query_heads=sizes.heads,
        kv_heads=sizes.heads,
        head_dim=key.head_dim,
        dtype=key.dtype,
        scale=default_scale(key.head_dim),
        window=bands.CAUSAL if key.band else bands.EVERYTHING,
        deterministic=key.deterministic,
        value_dim=None if key.value_dim == key.head_dim else key.value_dim,
        has_ranges=key.ranges,
    )


def ranges(problem: Problem, sizes: Sizes) -> dict[str, np.ndarray]:
    """Makes ranges that every row has alike, tags that all match, no sinks and no mask of pairs.

    Orders of tiles are as long as if these had one row; no kernel reads past its tiles.
    """
    tiles, low = -(-problem.query_length // TILE_ROWS), int(sizes.hidden == "limits")
    entry = [low, problem.key_length, low, problem.key_length]
    rows = (1, problem.query_length)
    return {
        "row_low": np.full(rows, low, np.int32),
        "row_high": np.full(rows, problem.key_length, np.int32),
        "row_table": np.tile(np.array(entry, np.int32), (1, tiles, 1)),
        "tag_low": np.zeros(rows, np.int32),
        "tag_high": np.zeros(rows, np.int32),
        "tag_key": np.zeros((1, problem.key_length), np.int32),
        "tag_tiles": np.full((1, tiles), int(sizes.hidden == "tags"), np.int32),
        "query_order": np.arange(problem.query_length, dtype=np.int32)[None],
        "key_order": np.arange(problem.key_length, dtype=np.int32)[None],
        "sinks": np.full(problem.query_heads, -np.inf, np.float32),
        "max_logit": np.zeros((1, 0), np.float32),
        "soft_cap": np.full(1, sizes.soft_cap, np.float32),
        "mask_bits": np.zeros((1, 0, 1, 1, 1), np.int32),
        "mask_some": np.zeros((1, 0, 1, 1), np.int32),
        "mask_every": np.zeros((1, 0, 1, 1), np.int32),
    }


def in_pages(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Makes pages of PAGE keys, in order, of keys and values whose length they divide."""
    pools = {name: arrays[name].reshape(-1, PAGE, *arrays[name].shape[2:]) for name in ("k", "v")}
    return pools | {"page_table": np.arange(pools["k"].shape[0], dtype=np.int32)[None]}


def operands(key: KernelKey, problem: Problem, sizes: Sizes) -> dict[str, np.ndarray]:
    """Makes the operands of a kernel: given ones are normal, intermediate ones zero."""
    rng, shapes = np.random.default_rng(0), given_shapes(problem)
    arrays: dict[str, np.ndarray] = {
        name: rng.normal(size=shapes[name]).astype(DTYPES[problem.dtype])
        for name in ("q", "k", "v", "o", "do")
    }
    extents = [[problem.query_length, problem.key_length, sizes.offset, 0]] * problem.batch
    arrays["extents"] = np.array(extents, np.int32)
    for name in ("q", "k", "v"):
        arrays[f"{name}_tangent"] = rng.normal(size=shapes[name]).astype(DTYPES[problem.dtype])
    arrays |= {name: np.zeros(shapes[name], np.float32) for name in ("lse", "dlse")}
    design = designs.design_of(key)
    forward, backward = (
        [launch(one, describe(one)) for one in keys]
        for keys in kernel_keys(problem, key.arch, design=design)
    )
    own = {"tail": tail.shape(backward, shapes), "dq_order": (0, 0, 0)}
    arrays |= {name: np.zeros(shape, np.int32) for name, shape in own.items() if shape is not None}
    for name, (result, shape) in new_buffers(problem, forward + backward, own).items():
        arrays[name] = np.zeros(shape, DTYPES[result.dtype])
    arrays |= ranges(problem, sizes) if key.ranges else {}
    arrays |= in_pages(arrays) if key.paged else {}
    return {name: arrays[name] for name in launch(key, describe(key)).operands}


def record(code: Code, sizes: Sizes, ctas: int = 1) -> Trace:
    """Runs a kernel on one multiprocessor, or cluster, and records its first CTAs or clusters.

    No kernel's path depends on its intermediate operands, which are zero.
    """
    problem = problem_of(code.key, sizes)
    arrays = operands(code.key, problem, sizes)
    packed = arguments.pack(code.launch, arrays, scalars(problem), multiprocessors=1)
    trace = Trace(frozenset(range(ctas * code.launch.cluster[0])))
    emulator.launch(
        code.text,
        code.symbol,
        **packed.keywords,
        policy=Policy(races=False),
        trace=trace,
    )
    return trace
