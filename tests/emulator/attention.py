"""Runs conformance cases through the kernels' PTX on the emulator."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from fa4_jax import catalogue
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import Inputs
from fa4_jax.key import KernelKey, Pass
from fa4_jax.plan import kernel_keys, scalars
from kernels import emulator
from kernels.build import cache, compile
from kernels.build.compile import Ptx
from kernels.descriptions import describe, names_of_barriers, warps_of_roles
from kernels.emulator import Names, Policy
from kernels.emulator.driver import arguments

MULTIPROCESSORS = 2
"""The number is small, so that the CTAs of a persistent kernel get several tiles each."""
_RESULTS = {"output": "o", "lse": "lse", "dq": "dq", "dk": "dk", "dv": "dv", "dq_acc": "dq_acc"}
"""The kernels' names of results, by the oracle's."""


@functools.cache
def ptx(key: KernelKey) -> Ptx:
    """The PTX of a kernel, from the build or from the one process that may import cutlass."""
    if (built := cache.find(key)) is not None:
        return Ptx(built.ptx, built.cubin.symbol, built.cubin.launch, built.cubin.tile)
    return _compiler(key.arch).submit(compile.compile_ptx, key).result()


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

    def after(self, kernel: Pass) -> Attention:
        """The launches that come after a kernel's, on what an ordinary run has left them."""
        arrays, last = dict(self.arrays), [key.kernel for key in self.keys].index(kernel)
        for key in self.keys[: last + 1]:
            arrays |= self._launch(key, arrays, Policy(), 0, unchanged)
        return dataclasses.replace(self, arrays=arrays, keys=self.keys[last + 1 :])

    def only(self, kernel: Pass) -> Attention:
        """The launch of one kernel, after those that come before it."""
        place = [key.kernel for key in self.keys].index(kernel)
        launches = self.after(self.keys[place - 1].kernel) if place else self
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
    forward, backward = kernel_keys(case.problem, arch)
    return Attention(
        arrays={
            "q": inputs.query,
            "k": inputs.key,
            "v": inputs.value,
            "do": inputs.output_bar,
            "dlse": inputs.lse_bar,
            "extents": np.array(case.extents, np.int32),
        },
        attributes=scalars(case.problem),
        keys=forward + backward if gradients else forward,
    )


def reversed_keys(case: Case, inputs: Inputs) -> Inputs:
    """The same inputs with the keys of every batch element reversed; padding stays in place.

    Kernels that visit the last block first need this to meet ever larger maxima in growing cases.
    """
    key = inputs.key.copy()
    for row, length in zip(key, case.key_lengths or (case.key_length,) * case.batch, strict=True):
        row[:length] = row[:length][::-1]
    return dataclasses.replace(inputs, key=key)
