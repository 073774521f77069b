"""Runs conformance cases through the kernels' PTX on the emulator."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import pathlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import util

import numpy as np

from fa4_jax import api, catalogue, launches, manifest, splits, tail
from fa4_jax.conformance import biases, runner
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import HESSIAN_PRODUCTS, STORAGE, Inputs
from fa4_jax.key import BIAS_GRADIENT_TILES, HESSIAN_PASSES, KernelKey, Pass
from fa4_jax.plan import (
    Kernel,
    Plan,
    given_shapes,
    hessian_keys,
    in_memory,
    kernel_keys,
    scalars,
    tangent_key,
)
from fa4_jax.row_statistics import row_statistics
from kernels import emulator
from kernels.build import cache, compile, package
from kernels.build.compile import Ptx
from kernels.common.launches import launch
from kernels.descriptions import describe, names_of_barriers, warps_of_roles
from kernels.emulator import Names, Policy
from kernels.emulator.driver import arguments
from tests.emulator.small_l2 import with_small_l2

MULTIPROCESSORS = 2
"""The number is small, so that the CTAs of a persistent kernel get several tiles each."""
_SAME = ("lse", "lse_tangent", "max_logit", "dq", "dk", "dv", "dq_acc", "dbias", *HESSIAN_PRODUCTS)
_RESULTS = {"output": "o", "output_tangent": "o_tangent"} | {name: name for name in _SAME}
"""The kernels' names of results, by the oracle's."""


ROWS = ("row_low", "row_high", "row_table", "tag_low", "tag_high", "tag_key", "tag_tiles")
OF_BACKWARD = {
    **{"mask_some": "group_some", "mask_every": "group_every", "bias": "backward_bias"},
    **{name: f"backward_{name}" for name in ROWS},
}
"""Buffers that a backward reads otherwise than a forward: of groups of heads, not of heads, or of a
bias in another form, or ranges where a forward with a soft cap alone has none; what they are called
here."""


_read: dict[KernelKey, Ptx] = {}


def read_ptx(folder: pathlib.Path) -> None:
    """Has `ptx` return the texts that `kernels.build --ptx` has written to a folder.

    A machine without the compiler can run them. Called before any text is asked for.
    """
    for key, record in manifest.load(folder / "manifest.json").cubins.items():
        text = (folder / record.file).read_text()
        _read[key] = Ptx(text, record.symbol, record.launch, record.tile)


@functools.cache
def ptx(key: KernelKey) -> Ptx:
    """The PTX of a kernel: that read, or the build's, to which a kernel is added that it lacks.

    The sample that `make test` builds lacks some.
    """
    if (read := _read.get(key)) is not None:
        return read
    if (built := cache.find(key)) is None:
        built = _compiler(key.arch).submit(package.compile_one, key).result()
        cache.store(built)
    return Ptx(built.ptx, built.cubin.symbol, built.cubin.launch, built.cubin.tile)


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

    case: Case
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
        if arrays.get("row_max", np.zeros(0)).size:
            arrays["max_logit"] = arrays["row_max"].max(axis=-1)
        if "dbias" in arrays:
            arrays["dbias"] = _bias_gradient(self.case, arrays["dbias"], self.keys[0].arch)
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
        # A split forward without ranges has arrays of them without rows.
        if key.kernel == Pass.BACKWARD_PRE and arrays.get("row_low", np.zeros(0)).size:
            sees = (arrays["row_low"] < arrays["row_high"])[:, None]
            own = np.where(sees, arrays["lse"], np.float32(-np.inf))  # as `launches.backward`
            arrays = arrays | {"lse": own}
        if key.kernel in HESSIAN_PASSES:
            of_rows = ("o", "lse"), ("do", "dlse"), ("o_tangent", "lse_tangent")
            pairs = ((arrays[x], arrays[y]) for x, y in of_rows)
            with np.errstate(all="ignore"):  # Padding may hold anything.
                arrays = arrays | {"row_statistics": row_statistics(np, *pairs)}
        if key.kernel in (Pass.BACKWARD, Pass.BIAS_GRADIENT):
            arrays = arrays | {name: arrays[of] for name, of in OF_BACKWARD.items() if of in arrays}
        packed = arguments.pack(code.launch, arrays, self.attributes, self.multiprocessors)
        emulator.launch(
            with_small_l2(key, text_of(key, code.text)),
            code.symbol,
            **packed.keywords,
            policy=policy,
            seed=seed,
            names=names(key),
        )
        return packed.results


def attention(
    case: Case,
    inputs: Inputs,
    gradients: bool = True,
    arch: str = "sm_90a",
    design: str | None = None,
) -> Attention:
    """The launches of a case, as `fa4_jax.attention` makes them; `design` as in `Target`.

    Inputs that have tangents ask for theirs, and for those of gradients, not for gradients.
    """
    forward, backward = kernel_keys(case.problem, arch, design=design)
    if inputs.tangents:
        first = attention(case, _at_rest(inputs), False, arch, design)
        return _with_tangent(first, case, inputs, hessian_keys(case.problem, arch) * gradients)
    if not case.has_kernels(arch, Pass.BACKWARD):
        backward = ()
    parts = _parts(case, forward)
    if parts and not splits.are_joined(parts["parts"].shape):
        forward = forward[:1]
    keys = forward + backward if gradients else forward
    return Attention(
        case,
        arrays=parts
        | _tail(case, backward)
        | _forward_buffers(case, inputs, keys)
        | {
            "q": inputs.query,
            "k": inputs.key,
            "v": inputs.value,
            "do": inputs.output_bar,
            "dlse": inputs.lse_bar,
            "extents": np.array(case.extents, np.int32),
        },
        attributes=scalars(case.problem),
        keys=keys,
    )


def _bias_gradient(case: Case, found: np.ndarray, arch: str) -> np.ndarray:
    """The gradient of a case's bias from the kernel's, as `bias_buffer.gradient` and JAX make it.

    found: as the bias, or pairs of its numbers, or by distance two halves of the diagonals of tiles
      of `BIAS_GRADIENT_TILES`.
    """
    if case.bias_kind is None:
        own = STORAGE[case.dtype]
        if found.shape[3] != case.key_length:
            return np.ascontiguousarray(found).view(own)[..., : case.key_length]
        return found.astype(own)
    of_rows = biases.KINDS[case.bias_kind].of_rows
    if of_rows is None:
        return found
    rows, tile = case.query_length, BIAS_GRADIENT_TILES[arch]
    total = np.zeros((*found.shape[:2], found.shape[3] + tile), np.float32)
    for half in range(found.shape[2]):
        total[..., half * tile : half * tile + found.shape[3]] += found[:, :, half]
    first = -rows % tile if found.shape[2] == 2 else 0
    total = total[:, :, None, first : first + rows + case.key_length - 1]
    offset = np.array(case.extents)[: found.shape[0], 2, None, None]
    distance = np.arange(total.shape[3]) - (rows - 1) - offset
    return of_rows(total, distance).sum((0, 1))


def _at_rest(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, tangents=())


def _with_tangent(
    forward: Attention, case: Case, inputs: Inputs, hessian: tuple[KernelKey, ...]
) -> Attention:
    """The launches of a forward, then that of its tangents, and those of gradients."""
    key = tangent_key(case.problem, forward.keys[0].arch)
    names = ("q_tangent", "k_tangent", "v_tangent")
    arrays = forward.arrays | dict(zip(names, inputs.tangents, strict=True))
    return dataclasses.replace(forward, arrays=arrays, keys=(*forward.keys, key, *hessian))


def _parts(case: Case, forward: tuple[KernelKey, ...]) -> dict[str, np.ndarray]:
    if forward[0].kernel is not Pass.FORWARD_SPLIT:
        return {}
    parts = splits.parts(case.problem, forward[0].arch)
    return {"parts": np.zeros(parts, np.int32), **nothing_more()}


def _tail(case: Case, backward: tuple[KernelKey, ...]) -> dict[str, np.ndarray]:
    """The operand that says for how many split key tiles the buffers have room."""
    if not backward:
        return {}
    shape = tail.shape([kernel(key).launch for key in backward], given_shapes(case.problem))
    unordered = {"dq_order": np.zeros((0, 0, 0), np.int32)}
    return unordered if shape is None else {**unordered, "tail": np.zeros(shape, np.int32)}


def nothing_more() -> dict[str, np.ndarray]:
    """What a split forward takes of a call without soft cap, sinks, ranges and tags."""
    none = np.zeros((1, 0), np.int32)
    numbers = dict.fromkeys(("soft_cap", "sinks"), np.zeros(0, np.float32))
    ranges = dict.fromkeys(("row_low", "row_high", "tag_low", "tag_high", "tag_key"), none)
    return {**numbers, **ranges, "row_table": none[..., None], "tag_tiles": none}


def _forward_buffers(
    case: Case, inputs: Inputs, keys: tuple[KernelKey, ...]
) -> dict[str, np.ndarray]:
    """The arrays that the library makes of a case's row masks and sinks.

    JAX makes them in a process of its own, since it does not survive a fork.
    """
    if not in_memory(case.problem, Pass.FORWARD) and case.bias is None:
        return {}
    return _resolver(os.getpid()).submit(_resolved, case, inputs, keys).result()


def kernel(key: KernelKey) -> Kernel:
    """A kernel of the catalogue, built or not."""
    return Kernel(key, launch(key, describe(key)))


def _resolved(case: Case, inputs: Inputs, keys: tuple[KernelKey, ...]) -> dict[str, np.ndarray]:
    operands, problem = api.canonicalise(runner.call(case, inputs))
    forward, *backward = map(kernel, keys)
    operands = api.for_kernels(Plan(problem, (forward,)), operands)
    backward = [one for one in backward if one.key.kernel is Pass.BACKWARD]
    buffers = launches.backward_buffers(problem, operands, backward[0]) if backward else {}
    buffers = {OF_BACKWARD.get(name, name): x for name, x in buffers.items()}
    if forward.key.kernel is Pass.FORWARD_SPLIT:
        buffers = launches.split_buffers(problem, operands) | buffers
    else:
        buffers |= launches.forward_buffers(problem, operands, forward)
    return {name: np.asarray(x) for name, x in buffers.items()}


@functools.cache
def _resolver(process: int) -> ProcessPoolExecutor:
    """The process that resolves masks for one that forks (`process`, whose cache it is in)."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    # A forked process closes its queues when it ends (priority 10) and joins its children: this one
    # would wait for work for ever.
    util.Finalize(pool, pool.shutdown, exitpriority=100)
    return pool


def reversed_keys(case: Case, inputs: Inputs) -> Inputs:
    """The same inputs with the keys of every batch element reversed; padding stays in place.

    Kernels that visit the last block first need this to meet ever larger maxima in growing cases.
    """
    key = inputs.key.copy()
    for row, length in zip(key, case.key_lengths or (case.key_length,) * case.batch, strict=True):
        row[:length] = row[:length][::-1]
    return dataclasses.replace(inputs, key=key)
