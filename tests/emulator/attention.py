"""Runs conformance cases through the kernels' PTX on the emulator."""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from fa4_jax import catalogue
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import Inputs
from fa4_jax.key import (
    POLYNOMIAL_EXP2_TILES,
    KernelKey,
    Pass,
    backward_value_dim,
    head_dim_tile,
)
from fa4_jax.manifest import Launch
from kernels import emulator
from kernels.build import cache, compile
from kernels.descriptions import describe, names_of_barriers, warps_of_roles
from kernels.emulator import Names, Policy
from kernels.emulator.driver import arguments

UNBOUNDED = 1 << 30
MULTIPROCESSORS = 2
"""So few that the CTAs of a persistent kernel get several tiles each."""
_RESULTS = {"output": "o", "lse": "lse", "dq": "dq", "dk": "dk", "dv": "dv", "dq_acc": "dq_acc"}
"""The oracle's names of results, and the kernels'."""


@dataclasses.dataclass(frozen=True)
class Ptx:
    """A kernel's text and how it is launched."""

    text: str
    symbol: str
    launch: Launch


@functools.cache
def ptx(key: KernelKey) -> Ptx:
    """The PTX of a kernel: the build's, or compiled in the one process that may import cutlass."""
    if (built := cache.find(key)) is not None:
        return Ptx(built.ptx, built.cubin.symbol, built.cubin.launch)
    return _compiler(key.arch).submit(_compile, key).result()


@functools.cache
def _compiler(arch: str) -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    pool.submit(compile.prepare_process, arch).result()
    return pool


def close() -> None:
    """Ends the compiling processes, if there are any."""
    if _compiler.cache_info().currsize:
        for arch in catalogue.ARCHITECTURES:
            _compiler(arch).shutdown()
        _compiler.cache_clear()


def _compile(key: KernelKey) -> Ptx:
    import tempfile

    import cutlass.cute as cute

    from kernels import sources

    source = sources.source(key)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {key.arch} --keep-ptx --dump-dir {folder}"
        compiled = cute.compile(source.host, *source.arguments, options=options)
        text: str = compiled.__ptx__
    symbol = re.search(r"\.entry (\w+)", text)
    assert symbol is not None
    return Ptx(text, symbol[1], source.launch)


def unchanged(key: KernelKey, text: str) -> str:
    """The text of a kernel as it is."""
    return text


@functools.cache
def names(key: KernelKey) -> Names:
    """What a kernel's description calls its warps and mbarriers."""
    description = describe(key)
    return Names(warps_of_roles(description), names_of_barriers(description))


@dataclasses.dataclass(frozen=True)
class Attention:
    """Launches of one case, in order, sharing their arrays by name."""

    arrays: dict[str, np.ndarray]
    attributes: dict[str, float]
    keys: tuple[KernelKey, ...]
    multiprocessors: int = MULTIPROCESSORS

    def run(
        self,
        policy: Policy,
        seed: int = 0,
        text_of: Callable[[KernelKey, str], str] = unchanged,
    ) -> dict[str, np.ndarray]:
        """Results by name; `text_of` may replace the text of a kernel."""
        arrays = dict(self.arrays)
        for key in self.keys:
            arrays |= self._launch(key, arrays, policy, seed, text_of)
        return {name: arrays[short] for name, short in _RESULTS.items() if short in arrays}

    def behind(self, kernel: Pass) -> Attention:
        """The launches that come after a kernel's, on what an ordinary run has left them."""
        arrays, last = dict(self.arrays), [key.kernel for key in self.keys].index(kernel)
        for key in self.keys[: last + 1]:
            arrays |= self._launch(key, arrays, Policy(), 0, unchanged)
        return dataclasses.replace(self, arrays=arrays, keys=self.keys[last + 1 :])

    def only(self, kernel: Pass) -> Attention:
        """The launch of one kernel, behind those that come before it."""
        place = [key.kernel for key in self.keys].index(kernel)
        launches = self.behind(self.keys[place - 1].kernel) if place else self
        return dataclasses.replace(launches, keys=self.keys[place : place + 1])

    def _launch(
        self,
        key: KernelKey,
        arrays: dict[str, np.ndarray],
        policy: Policy,
        seed: int,
        text_of: Callable[[KernelKey, str], str],
    ) -> dict[str, np.ndarray]:
        code = ptx(key)
        packed = arguments.pack(code.launch, arrays, self.attributes, self.multiprocessors)
        emulator.launch(
            text_of(key, code.text),
            code.symbol,
            **packed.keywords,
            policy=policy,
            seed=seed,
            names=names(key),
        )
        return packed.results


def attention(
    case: Case, inputs: Inputs, gradients: bool = True, arch: str = "sm_90a"
) -> Attention:
    """The launches of a case, as `fa4_jax.attention` makes them."""
    batch, (left, right) = case.batch, _window(case)
    offsets = np.broadcast_to(np.asarray(case.query_offset), (batch,))
    lengths = (
        case.query_lengths or (case.query_length,) * batch,
        case.key_lengths or (case.key_length,) * batch,
    )
    extents = np.stack([*map(np.asarray, lengths), offsets, np.zeros(batch)], 1).astype(np.int32)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    tile = head_dim_tile(max(case.head_dim, case.value_dim or 0))
    assert tile is not None
    band = left != UNBOUNDED or right != UNBOUNDED

    value_tile = backward_value_dim(arch, tile, case.value_dim or case.head_dim)

    def key(kernel: Pass, value_dim: int = tile, **flags: bool) -> KernelKey:
        return KernelKey(arch, kernel, case.dtype, tile, value_dim=value_dim, **flags)

    polynomial = case.numerics == "fast" and (arch, tile) in POLYNOMIAL_EXP2_TILES
    keys = [key(Pass.FORWARD, band=band, polynomial_exp2=polynomial)]
    if gradients:
        keys += [
            key(Pass.BACKWARD_PRE, value_tile, deterministic=case.deterministic),
            key(Pass.BACKWARD, value_tile, band=band, deterministic=case.deterministic),
            key(Pass.BACKWARD_POST, value_tile),
        ]
    return Attention(
        arrays={
            "q": inputs.query,
            "k": inputs.key,
            "v": inputs.value,
            "do": inputs.output_bar,
            "dlse": inputs.lse_bar,
            "extents": extents,
        },
        attributes={
            "scale_log2": scale * math.log2(math.e),
            "scale": scale,
            "rescale_threshold_log2": 8.0 if case.numerics == "fast" else 0.0,
            "window_left": left,
            "window_right": right,
        },
        keys=tuple(keys),
    )


def reversed_keys(case: Case, inputs: Inputs) -> Inputs:
    """The same with the keys of every batch element in reverse, padding where it was.

    Kernels that visit the last block first meet ever larger maxima in growing cases only so.
    """
    key = inputs.key.copy()
    for row, length in zip(key, case.key_lengths or (case.key_length,) * case.batch, strict=True):
        row[:length] = row[:length][::-1]
    return dataclasses.replace(inputs, key=key)


def _window(case: Case) -> tuple[int, int]:
    left, right = case.window if isinstance(case.window, tuple) else (case.window, case.window)
    left, right = (UNBOUNDED if side is None else side for side in (left, right))
    return left, min(right, 0) if case.is_causal else right
