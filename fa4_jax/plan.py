"""From a problem to its launches: which kernels, with which scalars and buffers, or why none.

These are pure functions without JAX, which the emulator and the benchmarks use, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from fa4_jax import designs, splits, tail, tile_choice
from fa4_jax.key import (
    CAPPED_APART,
    DTYPES,
    HEAD_DIM_TILES,
    HESSIAN_HEAD_DIMS,
    HESSIAN_PASSES,
    PAGE_KEYS,
    POLYNOMIAL_EXP2_TILES,
    SHORT_TILES,
    SINKS_WITH_BANDS,
    TICKETS_WITH_BANDS,
    KernelKey,
    Pass,
    head_dim_tile,
    value_dim_tile,
)
from fa4_jax.manifest import Launch, Manifest, Result, evaluate_size
from fa4_jax.problem import Problem

RESCALE_THRESHOLD_LOG2 = {"fast": 8.0, "exact": 0.0}
"""How far (in powers of two) the row maximum may lag before the accumulator is rescaled: FA4."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What kernels are there to choose from.

    Attributes:
      arch: "sm_90a", "sm_100f", or None without a supported device; the device's or one named.
      manifest: installed kernels, or None without any.
      unavailable: why arch or manifest is missing, in words.
      fast_exp2: the special-function unit keeps up with the tensor core (compute capability 10.3),
        so that no exponential is a polynomial.
      platforms: JAX platforms that can launch kernels.
      design: one of `designs.DESIGNS` where a pass has both; None for the chosen one.
    """

    arch: str | None
    manifest: Manifest | None
    unavailable: str = ""
    fast_exp2: bool = False
    platforms: tuple[str, ...] = ("cuda",)
    design: str | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch: the key and how it is called. Hashable, unlike the manifest's record."""

    key: KernelKey
    launch: Launch


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs. Hashable: part of the jit cache key.

    Attributes:
      forward, backward: launches in order; empty where the default path runs.
      tangent: the launch that follows a forward and computes tangents of output and log-sum-exp.
      hessian: the launches that follow it and compute how gradients move with the operands.
      forward_reason, backward_reason, tangent_reason, hessian_reason: why they are empty, else
        None.
      insist: implementation="kernel": nothing else may run.
      platforms: where kernels run; elsewhere the default path does.
      arch: of the kernels; None without a supported device.
      declined: implementation="xla".
    """

    problem: Problem
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    forward_reason: str | None = None
    backward_reason: str | None = None
    tangent: tuple[Kernel, ...] = ()
    tangent_reason: str | None = None
    hessian: tuple[Kernel, ...] = ()
    hessian_reason: str | None = None
    insist: bool = False
    platforms: tuple[str, ...] = ("cuda",)
    arch: str | None = None
    declined: bool = False

    @property
    def parts(self) -> splits.Parts | None:
        """Shape of the split forward's buffer `parts`; None where another forward runs.

        It follows the problem's sizes, which differ on the devices of a mesh and under vmap.
        """
        if not self.forward or self.forward[0].key.kernel is not Pass.FORWARD_SPLIT:
            return None
        return splits.parts(self.problem, self.forward[0].key.arch)

    @property
    def forward_launches(self) -> tuple[Kernel, ...]:
        """The kernels of the forward that run: one part of all keys is not joined."""
        parts = self.parts
        whole = parts is not None and not splits.are_joined(parts)
        return self.forward[:1] if whole else self.forward

    @property
    def tail_shape(self) -> tail.Shape | None:
        """Shape of the backward's buffer `tail`; None where another backward runs."""
        if not self.backward:
            return None
        launches = [kernel.launch for kernel in self.backward]
        return tail.shape(launches, given_shapes(self.problem))

    def resized(self, **sizes: int) -> Plan:
        """The same launches on another batch size or number of heads, which no key depends on."""
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, **sizes))


def kernel_keys(
    problem: Problem, arch: str, fast_exp2: bool = False, design: str | None = None
) -> tuple[tuple[KernelKey, ...], tuple[KernelKey, ...]]:
    """Keys of the forward and of the backward launches; `fast_exp2` and `design` as in `Target`.

    Raises:
      KeyError: the head dim has no tile (`unsupported` says so in words).
    """
    tile = _head_dim_tile(problem)
    if problem.bias is not None or problem.page_length is not None:
        design = None  # Of these the chosen one alone is built.

    def key(kernel: Pass, value_dim: int = tile, **flags: bool) -> KernelKey:
        pair = designs.is_pair(arch, kernel, (tile, value_dim), design)
        return KernelKey(arch, kernel, problem.dtype, tile, value_dim=value_dim, pair=pair, **flags)

    has_polynomial = (arch, tile) in POLYNOMIAL_EXP2_TILES

    def limits(kernel: Pass) -> dict[str, bool]:
        asked, has_bias = in_memory(problem, kernel), problem.bias is not None
        sinks = asked == ("sinks",) and (arch, tile) in SINKS_WITH_BANDS
        # Kernels that read ranges, sinks or a bias have a band, too.
        return {
            "band": problem.band or bool(asked) or has_bias,
            "ranges": bool(asked) and not sinks,
            "sinks": sinks,
            "soft_cap": problem.has_soft_cap and arch in CAPPED_APART,
            "bias": has_bias,
        }

    def value_tile(kernel: Pass) -> int:
        return value_dim_tile(arch, kernel, tile, problem.head_dims[1])

    of_gradient = value_tile(Pass.BACKWARD)
    # With a bias the ordered kernels alone are built: a wheel has no room for both.
    in_order = problem.deterministic or problem.bias is not None
    backward = (
        key(Pass.BACKWARD_PRE, of_gradient, deterministic=in_order),
        key(Pass.BACKWARD, of_gradient, deterministic=in_order, **limits(Pass.BACKWARD)),
        key(Pass.BACKWARD_POST, of_gradient),
    )
    if problem.bias is not None:
        backward += (KernelKey(arch, Pass.BIAS_GRADIENT, problem.dtype, tile, band=True),)
    paged = problem.page_length is not None
    if paged and not splits.has_few_rows(problem):
        # `decode` takes no numerics, so that one kernel of a tile is enough.
        flags = {"short": (arch, tile) in SHORT_TILES, "polynomial_exp2": has_polynomial}
        return (key(Pass.FORWARD, band=True, paged=True, **flags),), backward
    if paged or splits.takes(problem):
        return (key(Pass.FORWARD_SPLIT, paged=paged), key(Pass.FORWARD_JOIN)), backward
    has_ranges = bool(in_memory(problem, Pass.FORWARD))
    short = tile_choice.takes_short(problem, (arch, tile), has_ranges, design)
    polynomial = has_polynomial and problem.numerics == "fast"
    polynomial &= not fast_exp2 and problem.bias is None
    narrow = design not in designs.TILES and tile_choice.takes_narrow(problem, (arch, tile))
    tiles = {"short": short and not narrow, "narrow": narrow}
    flags = {**limits(Pass.FORWARD), "polynomial_exp2": polynomial, **tiles}
    if arch in TICKETS_WITH_BANDS:
        # Lengths make the tiles of a dense call unequal, too. Short tiles are built with a band.
        flags["band"] |= problem.has_lengths or short
        flags["band"] |= tile_choice.takes_tile_of_band(problem, (arch, tile), design)
    return (key(Pass.FORWARD, value_tile(Pass.FORWARD), **flags),), backward


def tangent_key(problem: Problem, arch: str) -> KernelKey:
    """Key of the launch that computes tangents; `no_tangent` says where none does.

    Raises:
      KeyError: the head dim has no tile (`unsupported` says so in words).
    """
    band = problem.band or (problem.has_lengths and arch in TICKETS_WITH_BANDS)
    return KernelKey(arch, Pass.TANGENT, problem.dtype, _head_dim_tile(problem), band=band)


def _head_dim_tile(problem: Problem) -> int:
    # The tile is as wide as the wider one. TMA fills the narrower one with zeros when it loads, and
    # clips it when it stores.
    tile = head_dim_tile(max(problem.head_dims))
    if tile is None:
        raise KeyError(problem.head_dims)
    return tile


def no_tangent(problem: Problem) -> str | None:
    """Why no kernel computes tangents of a problem whose forward has one."""
    asked = (*in_memory(problem, Pass.FORWARD), *(["bias"] if problem.bias is not None else []))
    return f"{', '.join(asked)}: no kernel computes tangents with them" if asked else None


def hessian_keys(problem: Problem, arch: str) -> tuple[KernelKey, ...]:
    """Keys of the launches that compute Hessian-vector products, of a problem with a tangent's."""
    tangent = tangent_key(problem, arch)
    if (arch, tangent.head_dim) not in HESSIAN_HEAD_DIMS:
        return ()
    return tuple(dataclasses.replace(tangent, kernel=kernel) for kernel in HESSIAN_PASSES)


def no_hessian(problem: Problem, arch: str) -> str | None:
    """Why no kernels compute Hessian-vector products where one computes tangents, or None."""
    if hessian_keys(problem, arch):
        return None
    return (
        f"head dims {problem.head_dims} on {arch}: no kernel computes their Hessian-vector products"
    )


def scalars(problem: Problem) -> dict[str, float]:
    """Every runtime scalar of the kernels, by parameter name.

    Raises:
      ValueError: the scale is traced (`unsupported` says so before).
    """
    if problem.scale is None:
        raise ValueError("scale is traced; the kernels take a static one")
    return {
        "scale": problem.scale,
        "scale_log2": problem.scale * math.log2(math.e),
        "rescale_threshold_log2": RESCALE_THRESHOLD_LOG2[problem.numerics],
        "window_left": problem.window[0],
        "window_right": problem.window[1],
        "bias_first": problem.bias_first,
    }


def given_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of the buffers that a call gives to its kernels, by name."""
    b, n, (head_dim, value_dim) = problem.batch, problem.query_heads, problem.head_dims
    rows, keys = (b, problem.query_length, n), (b, problem.key_length, problem.kv_heads)
    vectors = (b, n, problem.query_length)
    return {
        "q": (*rows, head_dim),
        "k": (*keys, head_dim),
        "v": (*keys, value_dim),
        "extents": (b, 4),
        "o": (*rows, value_dim),
        "lse": vectors,
        "max_logit": (b, n if problem.returns_max_logit else 0),
        "do": (*rows, value_dim),
        "dlse": vectors,
    }


def new_buffers(
    problem: Problem, launches: Iterable[Launch], own: Mapping[str, tuple[int, ...] | None]
) -> dict[str, tuple[Result, tuple[int, ...]]]:
    """Buffers that launches add to the given ones, in the order of their making, with shapes.

    own: shapes of `Plan.parts` and `Plan.tail_shape` by the buffers' names.
    """
    shapes, found = given_shapes(problem), dict[str, tuple[Result, tuple[int, ...]]]()
    shapes |= {name: shape for name, shape in own.items() if shape is not None}
    for launch in launches:
        for result in launch.results:
            if 0 in shapes.get(result.name, (0,)):
                shapes[result.name] = tuple(evaluate_size(size, shapes) for size in result.shape)
                found[result.name] = result, shapes[result.name]
    return found


def unsupported(problem: Problem) -> str | None:
    """Why no kernel of any architecture takes this problem, or None."""
    if (reason := _unread_bias(problem)) is not None:
        return reason
    if problem.has_score_fn:
        return "score_fn: it runs on the default path alone"
    if problem.scale is None:
        return "scale: it is traced, the kernels take a static one"
    if problem.dtype not in DTYPES:
        return f"query dtype {problem.dtype}: the kernels take {' and '.join(DTYPES)}"
    for name, head_dim in zip(("head_dim", "head_dim of value"), problem.head_dims, strict=True):
        if head_dim % 8:
            return f"{name} {head_dim}: the kernels take multiples of 8"
        if head_dim_tile(head_dim) is None:
            return f"{name} {head_dim}: the kernels take at most {HEAD_DIM_TILES[-1]}"
    if problem.page_length is None:
        return None
    page = problem.page_length
    if page % PAGE_KEYS:
        near = sorted({max(page // PAGE_KEYS, 1) * PAGE_KEYS, -(-page // PAGE_KEYS) * PAGE_KEYS})
        nearest = " and ".join(map(str, near))
        return f"pages of {page} tokens: the kernels take multiples of {PAGE_KEYS}, next {nearest}"
    return "segment_ids or mask with pages: no kernel takes both" if problem.has_ranges else None


def _unread_bias(problem: Problem) -> str | None:
    """Why no kernel takes a problem's bias, or None."""
    if problem.bias is None:
        return None
    if problem.bias == "other":
        return "bias: the kernels take alibi, relative, banded, and dense ones of an element a key"
    beside = (*in_memory(problem, Pass.FORWARD), *(["pages"] if problem.page_length else []))
    return f"bias beside {', '.join(beside)}: no kernel takes both" if beside else None


def in_memory(problem: Problem, kernel: Pass) -> tuple[str, ...]:
    """The arguments whose arrays a pass reads or writes beside those of every call."""
    asked = {
        "segment_ids or mask": problem.has_ranges or problem.has_mask,
        "logits_soft_cap": problem.has_soft_cap,
        # To the backward sinks are in the log-sum-exp.
        "sinks": problem.has_sinks and kernel is Pass.FORWARD,
        "return_max_logit": problem.returns_max_logit and kernel is Pass.FORWARD,
    }
    return tuple(name for name, is_there in asked.items() if is_there)


def asked_by(problem: Problem, key: KernelKey) -> str:
    """The arguments that ask for a kernel which not every architecture and pass has."""
    return f"{', '.join(in_memory(problem, key.kernel))}: " if key.ranges else ""


def _missing(problem: Problem, keys: tuple[KernelKey, ...], manifest: Manifest) -> str | None:
    """Which kernel is not installed and what is, or None if all are."""
    for key in keys:
        if key not in manifest.cubins:
            near = sorted(
                k.name for k in manifest.cubins if (k.arch, k.kernel) == (key.arch, key.kernel)
            )
            found = ", ".join(near) or "none"
            return f"{asked_by(problem, key)}no kernel {key.name} is installed; there are: {found}"
    return None


def unread_mask(problem: Problem, keys: tuple[KernelKey, ...]) -> str | None:
    """Why kernels do not take the mask of pairs of a call, or None."""
    if not problem.has_mask:
        return None
    for key in keys:
        if key.kernel in (Pass.FORWARD, Pass.BACKWARD) and not key.reads_mask:
            return (
                f"mask: {key.name} reads no bits of a boolean array, function, union or complement "
                "(it takes is_causal, window, lengths, segment_ids and ranges)"
            )
    return None


def _traced_cap(problem: Problem) -> str | None:
    """Why no backward kernel takes the call's soft cap, or None."""
    if not problem.has_soft_cap or problem.soft_cap is not None:
        return None
    return (
        "logits_soft_cap: it is traced, and the kernels compute no gradient of it; give a number, "
        "or implementation='xla'"
    )


def _kernels(keys: tuple[KernelKey, ...], manifest: Manifest) -> tuple[Kernel, ...]:
    return tuple(Kernel(key, manifest.cubins[key].launch) for key in keys)


def _without_kernels(problem: Problem, reason: str | None, **facts: Any) -> Plan:
    """A plan of the default path."""
    reasons = ("forward_reason", "backward_reason", "tangent_reason", "hessian_reason")
    return Plan(problem, **dict.fromkeys(reasons, reason), **facts)


def make_plan(problem: Problem, target: Target, implementation: str | None) -> Plan:
    """The launches of a call.

    Args:
      implementation: None chooses kernels where they fit, "kernel" insists, "xla" declines.

    Raises:
      NotImplementedError: implementation="kernel" and no forward kernel fits; the reason is named.
        A missing backward is raised when a gradient is asked for.
    """
    if implementation == "xla":
        reason = "implementation='xla'"
        return _without_kernels(problem, reason, declined=True)
    reason = unsupported(problem)
    if reason is None and (target.arch is None or target.manifest is None):
        reason = target.unavailable
    if reason is not None or target.arch is None or target.manifest is None:
        if implementation == "kernel":
            raise NotImplementedError(f"implementation='kernel': {reason}")
        return _without_kernels(problem, reason, arch=target.arch)
    forward, backward = kernel_keys(problem, target.arch, target.fast_exp2, target.design)
    forward_reason = unread_mask(problem, forward) or _missing(problem, forward, target.manifest)
    backward_reason = forward_reason or unread_mask(problem, backward)
    backward_reason = backward_reason or _missing(problem, backward, target.manifest)
    backward_reason = backward_reason or _traced_cap(problem)
    if forward_reason is not None and implementation == "kernel":
        raise NotImplementedError(f"implementation='kernel': {forward_reason}")
    tangent = (tangent_key(problem, target.arch),)
    tangent_reason = forward_reason or no_tangent(problem)
    tangent_reason = tangent_reason or _missing(problem, tangent, target.manifest)
    hessian = hessian_keys(problem, target.arch)
    hessian_reason = tangent_reason or no_hessian(problem, target.arch)
    hessian_reason = hessian_reason or _missing(problem, hessian, target.manifest)
    return Plan(
        problem,
        tangent=() if tangent_reason else _kernels(tangent, target.manifest),
        tangent_reason=tangent_reason,
        hessian=() if hessian_reason else _kernels(hessian, target.manifest),
        hessian_reason=hessian_reason,
        forward=() if forward_reason else _kernels(forward, target.manifest),
        backward=() if backward_reason else _kernels(backward, target.manifest),
        forward_reason=forward_reason,
        backward_reason=backward_reason,
        insist=implementation == "kernel",
        platforms=target.platforms,
        arch=target.arch,
    )
