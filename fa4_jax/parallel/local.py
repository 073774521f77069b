"""Context-parallel attention inside the caller's shard_map."""

from __future__ import annotations

import dataclasses
import functools
import math
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fa4_jax import api, autodiff, extents, mesh_types, validate, xla
from fa4_jax.api import Call, Implementation, Numerics, Window
from fa4_jax.bands import EVERYTHING
from fa4_jax.masks import Mask, resolve
from fa4_jax.masks.values import Ids
from fa4_jax.operands import Operands, Results
from fa4_jax.parallel import gather, ring, ulysses
from fa4_jax.parallel.layout import Layout, from_zigzag, to_zigzag
from fa4_jax.parallel.row_ranges import with_masks
from fa4_jax.parallel.schemes import AllGather, Ring, RingUlysses, Scheme, Ulysses
from fa4_jax.parallel.shard_calls import Work
from fa4_jax.parallel.shard_plan import ShardPlan
from fa4_jax.plan import Plan, make_plan
from fa4_jax.problem import Problem


def local_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    scheme: Scheme,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | ArrayLike = 0,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    mask: Mask | None = None,
    segment_ids: Ids = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic: bool = False,
    numerics: Numerics = "fast",
    return_residual: bool = False,
    return_max_logit: bool = False,
    implementation: Implementation = None,
    arch: str | None = None,
) -> Any:
    """`fa4_jax.attention` on sequences whose shards lie on the devices of a mesh axis.

    To be called inside a shard_map whose manual axes include the scheme's.

    Args:
      query: this device's shard, [B, T / n, N, H] or [T / n, N, H].
      key, value: this device's shards, [B, S / n, K, H] or [S / n, K, H].
      scheme: how the devices work together, and the order of the shards.
      query_offset, query_seq_lengths, key_value_seq_lengths: of the whole sequences, in their
        natural order; the same on all devices of the scheme's axes. An int as query_offset is part
        of the program: which shards meet follows from it.
      mask, segment_ids: as `fa4_jax.attention`, but no dense mask and no tile table; arrays of
        tokens are this device's shards, in the order of its rows. Segments may cross shards. A
        function is given positions in the whole sequences, and batch entries and heads of this
        device's shards.
      sinks: [N], those of this device's heads.
      scale, is_causal, local_window_size, logits_soft_cap, numerics, return_residual,
        return_max_logit, implementation, arch: as `fa4_jax.attention`; scale and cap are static.
      deterministic: output and gradients are bitwise the same in every run on as many devices.

    Returns:
      This device's shard of the output or, with return_residual, of output and log-sum-exp, as
      `fa4_jax.attention` returns them.

    Raises:
      ValueError: an argument is wrong, or does not fit the scheme; the message says what would.
      NotImplementedError: as `fa4_jax.attention`.
    """
    call = Call(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_max_logit=return_max_logit,
        deterministic=deterministic,
        numerics=numerics,
    )
    sizes = tuple((axis, _axis_size(axis)) for axis in scheme.axes)
    operands, problem = api.canonicalise(call)
    check_static(problem)
    masked = dataclasses.replace(call, mask=mask, segment_ids=segment_ids)
    validate.flag("return_residual", return_residual)
    validate.choice("implementation", implementation, validate.IMPLEMENTATIONS)
    whole = extents.checked(query_seq_lengths, key_value_seq_lengths, query_offset, problem.batch)
    problem = dataclasses.replace(problem, has_lengths=whole.has_lengths)
    request = Request(scheme, sizes, static_offset(query_offset), implementation, arch)
    tokens = resolve.Tokens(request.devices, functools.partial(_gathered, request))
    problem, operands = with_masks(problem, operands, masked, whole, tokens)
    t, s = request.devices * problem.query_length, request.devices * problem.key_length
    array = whole.array(problem.batch, t, s)
    results = attend(request, problem, operands._replace(extents=array, offset=None))
    return api.returned(results, jnp.ndim(query), return_residual)


def _gathered(request: Request, x: jax.Array) -> jax.Array:
    """A shard [B, L / n] of one number a token -> the whole sequence, in its natural order."""
    for axis in reversed(request.scheme.axes):
        x = lax.all_gather(x, axis, axis=1, tiled=True)
    return natural(request.scheme, request.sizes, x)


def natural(scheme: Scheme, sizes: tuple[tuple[str, int], ...], x: jax.Array) -> jax.Array:
    """Whole sequences [B, L], in the scheme's order -> in their natural order."""
    return from_zigzag(x, sizes[0][1]) if scheme.layout == "zigzag" else x


def check_static(problem: Problem) -> None:
    """What context parallelism has to know while a program is traced.

    Raises:
      NotImplementedError: the scale or the soft cap is traced, or a size symbolic.
    """
    validate.known_sizes(problem, "fa4_jax.parallel")
    validate.static_scale(problem.scale)
    if problem.has_soft_cap and problem.soft_cap is None:
        raise NotImplementedError("logits_soft_cap is traced; fa4_jax.parallel takes a static one")


def static_offset(query_offset: Any) -> int | None:
    """The query offset where it is a number, by which it is decided which shards meet, or None."""
    return int(query_offset) if isinstance(query_offset, Integral) else None


@dataclasses.dataclass(frozen=True)
class Request:
    """What is known about a call besides its problem. Hashable.

    Attributes:
      sizes: (name, size) of the scheme's mesh axes.
      offset: the query offset; None if it is an array.
    """

    scheme: Scheme
    sizes: tuple[tuple[str, int], ...]
    offset: int | None
    implementation: Implementation
    arch: str | None

    @property
    def devices(self) -> int:
        """The number of devices that a sequence is shared out among."""
        return math.prod(size for _, size in self.sizes)

    def size(self, axis: str) -> int:
        """The number of devices along one of the scheme's axes."""
        return dict(self.sizes)[axis]

    def plan(self, problem: Problem) -> Plan:
        """The launches of a call on one device."""
        return make_plan(problem, api.find_target(self.arch), self.implementation)


def attend(request: Request, problem: Problem, operands: Operands) -> Results:
    """Output, log-sum-exp and largest scores of this device's shards, inside a shard_map.

    Args:
      problem: attention of one shard's rows and one shard's keys, with the device's heads.
      operands: its shards, with the extents of the whole sequences, int32 [B, 4].

    Raises:
      ValueError: an axis is Explicit here, or the shards do not fit the scheme.
    """
    if mesh_types.explicit_mesh(operands) is not None:
        raise ValueError(
            "an axis of the mesh is still Explicit inside this shard_map: make all of its axes "
            "manual (leave out axis_names)"
        )
    operands = _typed(request.scheme, operands)
    empty = validate.is_empty(problem)
    found = xla.nothing(problem, operands) if empty else _attend(request, problem, operands)
    if found.max_logit is None:
        return found
    largest = lax.pmax(lax.stop_gradient(found.max_logit), request.scheme.axes)
    return found._replace(max_logit=largest)


def _axis_size(axis: str) -> int:
    """Devices along a manual mesh axis.

    Raises:
      ValueError: there is no such axis here.
    """
    try:
        return lax.axis_size(axis)
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        raise ValueError(
            f"the scheme's mesh axis {axis!r} is no manual axis here (there are: "
            f"{', '.join(map(repr, manual)) or 'none'}): call local_attention inside a shard_map "
            "over it, or fa4_jax.parallel.attention on whole arrays"
        ) from None


def _typed(scheme: Scheme, operands: Operands) -> Operands:
    """Operands that all vary over the same axes, the scheme's among them."""
    # Where types do not tell (check_vma=False) an index has none, and nothing is cast.
    indices = [lax.axis_index(axis) for axis in scheme.axes]
    axes = mesh_types.union_varying((operands, indices))
    return jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), operands)


def _attend(request: Request, problem: Problem, operands: Operands) -> Results:
    match request.scheme:
        case Ring(axis, layout):
            return ring.attend(_ring_work(axis, layout, request, problem), operands)
        case AllGather(axis, layout):
            return gather.attend(_work(axis, layout, request, problem), operands)
        case Ulysses(axis, layout):
            devices = request.size(axis)
            plan = request.plan(_share_of_heads(problem, axis, devices))
            whole = functools.partial(_whole, plan, layout, devices)
            return ulysses.attend(axis, whole, operands)
        case RingUlysses(ring_axis, ulysses_axis, layout):
            local = _share_of_heads(problem, ulysses_axis, request.size(ulysses_axis))
            work = _ring_work(ring_axis, layout, request, local)
            return ulysses.attend(ulysses_axis, functools.partial(ring.attend, work), operands)


def _share_of_heads(problem: Problem, axis: str, devices: int) -> Problem:
    """The problem between Ulysses' exchanges.

    Raises:
      ValueError: the heads cannot be shared out.
    """
    ulysses.check_heads(problem.query_heads, problem.kv_heads, axis, devices)
    return dataclasses.replace(
        problem,
        query_length=devices * problem.query_length,
        key_length=devices * problem.key_length,
        query_heads=problem.query_heads // devices,
        kv_heads=max(1, problem.kv_heads // devices),
    )


def _work(axis: str, layout: Layout, request: Request, problem: Problem) -> Work:
    """A device's share, given the problem of its shards.

    Raises:
      ValueError: the shards cannot be two equal chunks.
    """
    t, s, devices = problem.query_length, problem.key_length, request.size(axis)
    if layout == "zigzag" and (t % 2 or s % 2):
        raise ValueError(
            f"zig-zag takes two equal chunks a device, but the shards have {t} rows and {s} keys: "
            f"pad the sequences to multiples of {2 * devices}, and give their lengths"
        )
    shards = ShardPlan(devices, layout, t, s, problem.window, request.offset)
    dense = dataclasses.replace(
        problem,
        window=EVERYTHING,
        has_lengths=problem.has_lengths or shards.kind == "causal",
    )
    return Work(axis, shards, request.plan(problem), request.plan(dense))


def _ring_work(axis: str, layout: Layout, request: Request, problem: Problem) -> Work:
    """A device's share in a ring, which adds sinks when it has met all keys."""
    return _work(axis, layout, request, dataclasses.replace(problem, has_sinks=False))


def _whole(plan: Plan, layout: Layout, devices: int, operands: Operands) -> Results:
    """Attention with whole sequences, which Ulysses' exchange leaves in the order of shards."""
    if layout == "contiguous":
        return autodiff.attend(plan, api.for_kernels(plan, operands))
    query, key, value = (from_zigzag(x, devices) for x in operands[:3])
    natural = operands._replace(query=query, key=key, value=value)
    output, lse, top = autodiff.attend(plan, api.for_kernels(plan, natural))
    return Results(to_zigzag(output, devices), to_zigzag(lse, devices, axis=2), top)
