"""What runs, and why: `supports`, `explain`, and the support table of the README."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import numpy as np

from fa4_jax import bands, bias_buffer, catalogue, designs, dispatch, validate
from fa4_jax.api import Call, attention, canonicalise, find_target
from fa4_jax.extents import offset_array
from fa4_jax.key import KernelKey, Pass
from fa4_jax.manifest import Manifest
from fa4_jax.masks import Mask, bits, in_bias, of_pairs, resolve, values
from fa4_jax.operands import RowRanges
from fa4_jax.paged import call as paged_call
from fa4_jax.paged import decode
from fa4_jax.paged.arguments import DecodeCall
from fa4_jax.paged.arguments import canonicalise as canonicalise_decode
from fa4_jax.paged.problem import PagedProblem
from fa4_jax.plan import (
    Plan,
    Target,
    asked_by,
    kernel_keys,
    make_plan,
    unread_mask,
    unsupported,
)
from fa4_jax.problem import Problem
from fa4_jax.workspaces import Held, Workspace, copies, workspaces

_LENGTHS_OF_DECODE = (
    *("query", "key_pages", "value_pages", "page_table"),
    *("lengths", "query_lengths"),
)
_NO_BACKWARD = "decode has no derivative"
_UNKNOWN = bands.UNBOUNDED
"""Stands for an offset that is traced; no call has it."""


@dataclasses.dataclass(frozen=True)
class Support:
    """Yes, or the reason why not. True exactly if the kernels take the call, both ways.

    `decode` has one way.
    """

    reason: str | None

    def __bool__(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return self.reason or "supported"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run here.

    Attributes:
      forward, backward: names of the kernels in launch order; empty for the default path.
      tiles: per kernel name, its tile sizes.
      designs: per kernel name, "single" (thread blocks work alone) or "pair" (two of a cluster
        share operands).
      splits: parts that the forward divides the keys into; 1 divides nothing. Devices that share
        a call out divide their own parts of it.
      workspaces: buffers beyond inputs and outputs, in a forward with its backward.
      forward_flops, backward_flops: multiplications and additions of visible pairs: 4 H and 10 H
        each. Lengths, offsets and masks that are traced count as if there were no limit.
      forward_reason, backward_reason: why the default path runs, else None. `decode` has no
        backward.
      tangent: name of the kernel that computes tangents, after the forward's; empty for the default
        path.
      hessian: names of the kernels that compute how gradients move with the operands, after those;
        empty for the default path, which computes all other second derivatives.
      tangent_reason, hessian_reason: why the default path computes them, or why there are none;
        else None.
    """

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    tiles: dict[str, dict[str, int]]
    designs: dict[str, str]
    splits: int
    workspaces: tuple[Workspace, ...]
    forward_flops: int
    backward_flops: int
    forward_reason: str | None
    backward_reason: str | None
    tangent: tuple[str, ...]
    tangent_reason: str | None
    hessian: tuple[str, ...]
    hessian_reason: str | None

    def __str__(self) -> str:
        lines = []
        for name, flops in (("forward", self.forward_flops), ("backward", self.backward_flops)):
            kernels, reason = getattr(self, name), getattr(self, f"{name}_reason")
            if reason == _NO_BACKWARD:
                continue
            path = "kernels" if kernels else f"default path ({reason})"
            lines.append(f"{name}: {flops / 1e9:.3f} GFLOP, {path}")
            lines += self._lines(kernels)
        if self.tangent:
            lines += ["tangents: kernels", *self._lines(self.tangent)]
            way = "kernels" if self.hessian else f"default path ({self.hessian_reason})"
            lines += [f"Hessian-vector products: {way}", *self._lines(self.hessian)]
            lines.append(f"other {dispatch.SECOND_DERIVATIVES}: default path")
        elif self.backward_reason != _NO_BACKWARD:
            lines.append(f"{dispatch.TANGENTS}: default path ({self.tangent_reason})")
        if self.splits > 1:
            lines.append(f"keys: divided into {self.splits} parts")
        lines += [
            f"workspace {w.name}: {w.dtype}{list(w.shape)}, {w.num_bytes / 1e6:.3f} MB"
            for w in self.workspaces
        ]
        return "\n".join(lines)

    def _lines(self, kernels: tuple[str, ...]) -> list[str]:
        """A line for each kernel: its design and its tile."""
        return [
            f"  {kernel}  {self.designs[kernel]}  "
            + " ".join(f"{k}={v}" for k, v in self.tiles[kernel].items())
            for kernel in kernels
        ]


def _problem(
    call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], for_kernels: bool
) -> tuple[Any, Any, Held]:
    """Static facts of a call whose operands may be ShapeDtypeStructs, and its implementation.

    Args:
      for_kernels: whether kernels may take it.

    Raises:
      ValueError: there is no such call, and as the call itself.
    """
    if call not in (attention, decode):
        raise ValueError(f"call must be fa4_jax.attention or fa4_jax.decode, got {call!r}")
    kwargs = dict(kwargs)
    validate.flag("return_residual", kwargs.pop("return_residual", False))
    implementation = validate.choice(
        "implementation", kwargs.pop("implementation", None), validate.IMPLEMENTATIONS
    )
    leaves, structure = jax.tree.flatten((args, kwargs))
    unknown = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    found: list[tuple[Any, Held]] = []

    def trace(arrays: list[jax.Array]) -> None:
        rest = iter(arrays)
        given = [next(rest) if flag else x for x, flag in zip(leaves, unknown, strict=True)]
        positional, named = jax.tree.unflatten(structure, given)
        if call is decode:
            found.append((canonicalise_decode(DecodeCall(*positional, **named))[1], Held()))
        else:
            operands, asked = canonicalise(Call(*positional, **named))
            problem = asked
            if for_kernels and implementation != "xla":
                operands, problem = in_bias.moved(operands, asked)
            bias = bias_buffer.abstract(operands, problem)
            copy = None
            if problem is not asked:
                copy = jax.ShapeDtypeStruct(operands.bias.shape, operands.bias.dtype)
            found.append((problem, Held(bits.shape_of(operands), bias, copy)))

    jax.eval_shape(trace, [x for x, flag in zip(leaves, unknown, strict=True) if flag])
    problem, held = found[0]
    return problem, implementation, held


def supports(*args: Any, call: Any = attention, arch: str | None = None, **kwargs: Any) -> Support:
    """Whether the kernels take a call, forward and backward.

    Args:
      *args, **kwargs: as for `attention`. Arrays may be `jax.ShapeDtypeStruct`s.
      call: `attention`, or `decode`, whose arguments the others are then.
      arch: "sm_90a" asks about the key list for that architecture, whatever this machine has;
        None about the GPU and the kernels that are here.

    Raises:
      ValueError, NotImplementedError: the call is wrong on any implementation.
    """
    is_known = arch is not None or find_target(None).arch is not None
    given, implementation, _ = _problem(call, args, kwargs, is_known)
    declined = "xla" if implementation == "xla" else None
    reason = "implementation='xla'" if declined else None
    if isinstance(given, PagedProblem):
        problem, no_kernel = paged_call.kernel_problem(given)
        reason = reason or no_kernel
    else:
        problem = given
    if arch is None:
        plan = make_plan(problem, find_target(None), declined)
        backward_reason = None if call is decode else plan.backward_reason
        return Support(reason or plan.forward_reason or backward_reason)
    if arch not in catalogue.ARCHITECTURES:
        return Support(f"arch {arch}: there are kernels for {', '.join(catalogue.ARCHITECTURES)}")
    reason = reason or unsupported(problem)
    if reason is None:
        forward, backward = kernel_keys(problem, arch, design=designs.asked())
        wanted = forward if call is decode else forward + backward
        missing = set(wanted) - set(catalogue.all_keys())
        reason = (
            f"{asked_by(problem, min(missing))}no kernel {min(missing).name}"
            if missing
            else unread_mask(problem, forward + backward)
        )
    return Support(reason)


def explain(
    *args: Any, call: Any = attention, arch: str | None = None, **kwargs: Any
) -> Explanation:
    """Which kernels, tiles, workspaces and FLOPs a call uses here.

    Args:
      *args, **kwargs: as for `attention`. Arrays may be `jax.ShapeDtypeStruct`s.
      call: `attention`, or `decode`, whose arguments the others are then.
      arch: as for `attention`: what a program uses that is lowered for such a GPU.

    Raises:
      ValueError, NotImplementedError: as the call.
    """
    target = find_target(arch)
    problem, implementation, held = _problem(call, args, kwargs, target.arch is not None)
    if isinstance(problem, PagedProblem):
        plan = _plan_of_decode(problem, target, implementation)
        pairs = _pairs_of_decode(problem.attention, args, kwargs)
        told = _explained(plan, pairs, target.manifest, held)
        return dataclasses.replace(told, workspaces=copies(problem, plan) + told.workspaces)
    validate.known_sizes(problem, "explain")
    plan = make_plan(problem, target, implementation)
    rows = _known_rows(problem, args, kwargs)
    return _explained(plan, visible_pairs(problem, kwargs, rows), target.manifest, held)


def _explained(plan: Plan, pairs: int, manifest: Manifest | None, held: Held) -> Explanation:
    """pairs: of a row and a key, for one head."""
    head_dim, value_dim = plan.problem.head_dims
    pairs *= plan.problem.query_heads
    has_backward = plan.backward_reason != _NO_BACKWARD
    return Explanation(
        forward=tuple(kernel.key.name for kernel in plan.forward_launches),
        backward=tuple(kernel.key.name for kernel in plan.backward),
        tiles=_tiles(plan, manifest),
        designs=_designs(plan),
        splits=1 if plan.parts is None else plan.parts[0],
        workspaces=workspaces(plan, held),
        forward_flops=2 * (head_dim + value_dim) * pairs,
        backward_flops=2 * (3 * head_dim + 2 * value_dim) * pairs if has_backward else 0,
        forward_reason=plan.forward_reason,
        backward_reason=plan.backward_reason,
        tangent=tuple(kernel.key.name for kernel in plan.tangent),
        tangent_reason=_tangent_reason(plan),
        hessian=tuple(kernel.key.name for kernel in plan.hessian),
        hessian_reason=_hessian_reason(plan),
    )


def _tangent_reason(plan: Plan) -> str | None:
    if plan.backward_reason == _NO_BACKWARD:
        return _NO_BACKWARD
    return None if plan.tangent else plan.forward_reason or dispatch.missing_derivatives(plan)


def _hessian_reason(plan: Plan) -> str | None:
    return None if plan.hessian else _tangent_reason(plan) or dispatch.missing_derivatives(plan)


def _plan_of_decode(problem: PagedProblem, target: Target, implementation: Any) -> Plan:
    """The launches of a call of `decode`, or the reason why it has none."""
    found = paged_call.make_plan(problem, implementation, target)
    if found.kernels is None:
        reason = found.reason or "implementation='xla'"
        return Plan(problem.attention, forward_reason=reason, backward_reason=_NO_BACKWARD)
    none = dict.fromkeys(("backward", "tangent", "hessian"), ())
    return dataclasses.replace(found.kernels, **none, backward_reason=_NO_BACKWARD)


def _pairs_of_decode(problem: Problem, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Pairs of a row and a token that it sees, for one head; lengths that are traced are full."""
    given = DecodeCall(*args, **{k: v for k, v in kwargs.items() if k in _LENGTHS_OF_DECODE})
    batch, rows, tokens = problem.batch, problem.query_length, problem.key_length
    lengths, own = (
        np.clip(np.broadcast_to(x if x is not None and _known(x) else full, (batch,)), 0, full)
        for x, full in ((given.lengths, tokens), (given.query_lengths, rows))
    )
    return sum(
        bands.visible_pairs(problem.band_of(int(t), int(s), int(s) - int(t)))
        for t, s in zip(own, lengths, strict=True)
    )


def _tiles(plan: Plan, manifest: Manifest | None) -> dict[str, dict[str, int]]:
    if manifest is None:
        return {}
    return {
        kernel.key.name: manifest.cubins[kernel.key].tile
        for kernel in plan.forward + plan.backward + plan.tangent + plan.hessian
    }


def _designs(plan: Plan) -> dict[str, str]:
    return {
        kernel.key.name: designs.PAIR if kernel.launch.cluster[0] == 2 else designs.SINGLE
        for kernel in plan.forward + plan.backward + plan.tangent + plan.hessian
    }


def _known(x: Any) -> bool:
    """Whether all arrays of a tree have values now."""
    return not any(
        isinstance(y, jax.core.Tracer | jax.ShapeDtypeStruct) for y in jax.tree.leaves(x)
    )


def _known_rows(problem: Problem, args: tuple[Any, ...], call: dict[str, Any]) -> RowRanges | None:
    """The ranges of masks and segment ids, if they and the query offset are known."""
    mask = args[4] if len(args) > 4 else call.get("mask")
    found = values.parts(mask if isinstance(mask, Mask) else None, call.get("segment_ids"))
    _, found = resolve.static_window(found)
    found, _ = of_pairs.divided(found)
    offset = call.get("query_offset", 0)
    if not _known((found, offset)):
        return None
    offset = offset_array(validate.query_offset(offset, problem.batch))
    rank = len((args[0] if args else call["query"]).shape)
    sizes = problem.batch, problem.query_length, problem.key_length
    with jax.ensure_compile_time_eval():
        return resolve.rows(found, resolve.Call(*sizes, rank, offset))


def visible_pairs(problem: Problem, call: dict[str, Any], rows: RowRanges | None = None) -> int:
    """Pairs of a row and a key that it sees, over the batch, for one head.

    Args:
      call: the keyword arguments of the call; what is traced or absent limits nothing.
      rows: ranges of its masks, if they are known. Of ids that come back, the pairs between a row's
        first and last key count.
    """

    def known(name: str, default: int) -> np.ndarray:
        x = call.get(name)
        return np.broadcast_to(
            np.asarray(x if x is not None and _known(x) else default), (problem.batch,)
        )

    query_lengths = known("query_seq_lengths", problem.query_length)
    key_lengths = known("key_value_seq_lengths", problem.key_length)
    offsets = known("query_offset", _UNKNOWN if "query_offset" in call else 0)
    total = 0
    for b, (t, s, offset) in enumerate(zip(query_lengths, key_lengths, offsets, strict=True)):
        t, s = min(int(t), problem.query_length), min(int(s), problem.key_length)
        if int(offset) == _UNKNOWN:
            total += t * s
        elif rows is None:
            total += bands.visible_pairs(problem.band_of(t, s, int(offset)))
        else:
            total += _pairs_in_ranges(problem.band_of(t, s, int(offset)), rows, b)
    return total


def _pairs_in_ranges(band: bands.Band, rows: RowRanges, batch: int) -> int:
    """Pairs of one batch entry that are in its band and in the rows' ranges."""
    b = batch if rows.low.shape[0] > 1 else 0
    row = np.arange(band.query_length)
    use = bands.Arithmetic(np.minimum, np.maximum, np.where)
    low, high = bands.row_limits(band, row, use)
    low = np.maximum(low, np.asarray(rows.low[b, : band.query_length]))
    high = np.minimum(high, np.asarray(rows.high[b, : band.query_length]))
    return int(np.maximum(high - low, 0).sum())


def table() -> str:
    """Markdown table of the key list: per architecture and type, the head dims of each feature."""
    features = (
        "causal, window",
        "segments, ranges, sinks",
        "any mask",
        "soft cap",
        "bias",
        "deterministic",
    )
    head = ("architecture", "type", "pass", "head_dim tiles", *features)
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    groups: dict[tuple[str, str, str], list[KernelKey]] = {}
    for key in catalogue.all_keys():
        if (name := _name_of_pass(key)) is not None:
            groups.setdefault((key.arch, key.dtype, name), []).append(key)
    for (arch, dtype, name), keys in groups.items():
        tiles = sorted({_head_dims(key) for key in keys})
        band, ranges, masked, capped, biased, ordered = (
            {_head_dims(key) for key in keys if getattr(key, flag)} == set(tiles)
            for flag in ("band", "ranges", "reads_mask", "reads_cap", "bias", "deterministic")
        )
        # Outside a backward all that adds to an output does so in one order.
        repeatable = ordered or name != "backward"
        if name in _SPLIT:  # One kernel has all of these.
            band, ranges, capped = True, True, True
        named = (str(d) if d == dv else f"({d}, {dv})" for d, dv in tiles)
        cells = [arch, dtype, name, ", ".join(named)]
        flags = (band, ranges, masked, capped, biased, repeatable)
        cells += ["yes" if flag else "no" for flag in flags]
        if name == _DECODE:
            cells[5] = "sinks"
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


_SHORT, _DECODE = "forward of few rows", "decode"
_SPLIT = (_SHORT, _DECODE)


def _name_of_pass(key: KernelKey) -> str | None:
    """What the table calls a kernel's pass, or None of a kernel that only belongs to another."""
    if key.kernel is Pass.FORWARD_SPLIT:
        return _DECODE if key.paged else _SHORT
    names = {
        Pass.FORWARD: "forward",
        Pass.TANGENT: "tangents",
        Pass.HESSIAN_KEY: "Hessian products",
        Pass.BACKWARD: "backward",
    }
    return names.get(key.kernel)


def _head_dims(key: KernelKey) -> tuple[int, int]:
    return key.head_dim, key.value_dim
