"""Context-parallel attention inside the caller's shard_map."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fa4_jax import api, autodiff, types, validate
from fa4_jax.api import Call, Implementation, Numerics, Window
from fa4_jax.default import Operands
from fa4_jax.parallel import gather, ring, ulysses
from fa4_jax.parallel.cut import Cut
from fa4_jax.parallel.layout import Layout, from_zigzag, to_zigzag
from fa4_jax.parallel.parts import Work
from fa4_jax.parallel.schemes import AllGather, Ring, RingUlysses, Scheme, Ulysses
from fa4_jax.plan import Plan, make_plan
from fa4_jax.problem import UNBOUNDED, Problem

Result = tuple[jax.Array, jax.Array]


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
    deterministic: bool = False,
    numerics: Numerics = "fast",
    return_residual: bool = False,
    implementation: Implementation = None,
) -> Any:
    """`fa4_jax.attention` on sequences whose shards lie on the devices of a mesh axis.

    To be called inside a shard_map whose manual axes include the scheme's.

    Args:
      query: this device's shard, [B, T / n, N, H] or [T / n, N, H].
      key, value: this device's shards, [B, S / n, K, H] or [S / n, K, H].
      scheme: how the devices work together, and the order of the shards.
      query_offset, query_seq_lengths, key_value_seq_lengths: of the whole sequences, in their
        natural order; the same on all devices of the scheme's axes.
      scale, is_causal, local_window_size, numerics, return_residual, implementation: as
        `fa4_jax.attention`.
      deterministic: output and gradients are bitwise the same in every run on as many devices.

    Returns:
      This device's shard of the output or, with return_residual, of output and log-sum-exp, as
      `fa4_jax.attention` returns them.

    Raises:
      ValueError: an argument is wrong, or does not fit the scheme; the message says what would.
      NotImplementedError: as `fa4_jax.attention`.
    """
    sizes = {axis: _axis_size(axis) for axis in scheme.axes}
    call = Call(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        deterministic=deterministic,
        numerics=numerics,
    )
    operands, problem = api.canonicalise(call)
    if types.explicit_mesh(operands) is not None:
        raise ValueError(
            "an axis of the mesh is still Explicit inside this shard_map: make all of its axes "
            "manual (leave out axis_names)"
        )
    validate.flag("return_residual", return_residual)
    validate.choice("implementation", implementation, validate.IMPLEMENTATIONS)
    extents = _Extents(query_seq_lengths, key_value_seq_lengths, query_offset)
    extents.check(problem)
    problem = dataclasses.replace(
        problem, query_offset=extents.static_offset(problem), has_lengths=extents.has_lengths
    )
    operands = _typed(scheme, operands, extents.array(problem, _count(sizes, scheme.axes)))
    if validate.is_empty(problem):
        output, lse = ring.nothing(operands)
        output = output.astype(operands.query.dtype)
    else:
        output, lse = _attend(scheme, sizes, problem, implementation, operands)
    if jnp.ndim(query) == 3:
        output, lse = output[0], lse[0]
    return (output, lse) if return_residual else output


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


def _count(sizes: dict[str, int], axes: tuple[str, ...]) -> int:
    count = 1
    for axis in axes:
        count *= sizes[axis]
    return count


@dataclasses.dataclass(frozen=True)
class _Extents:
    """Lengths and offset of the whole sequences, as the caller gave them."""

    query_lengths: Any
    key_lengths: Any
    offset: Any

    def check(self, problem: Problem) -> None:
        """Raises ValueError if one is wrong."""
        validate.lengths("query_seq_lengths", self.query_lengths, problem.batch)
        validate.lengths("key_value_seq_lengths", self.key_lengths, problem.batch)
        validate.query_offset(self.offset, problem.batch)

    @property
    def has_lengths(self) -> bool:
        """Whether there may be padding."""
        return self.query_lengths is not None or self.key_lengths is not None

    def static_offset(self, problem: Problem) -> int | None:
        """The offset as far as it is known now; without a band it does not matter."""
        if not problem.band:
            return 0
        return int(self.offset) if isinstance(self.offset, numbers.Integral) else None

    def array(self, problem: Problem, devices: int) -> jax.Array:
        """int32 [B, 4]: query length, key length, query offset, 0."""
        t, s = devices * problem.query_length, devices * problem.key_length
        columns = (
            (t if self.query_lengths is None else self.query_lengths, 0, t),
            (s if self.key_lengths is None else self.key_lengths, 0, s),
            (self.offset, -UNBOUNDED, UNBOUNDED),
            (0, 0, 0),
        )
        clipped = [
            jnp.broadcast_to(jnp.clip(jnp.asarray(x, jnp.int32), low, high), (problem.batch,))
            for x, low, high in columns
        ]
        return jnp.stack(clipped, axis=1)


def _typed(scheme: Scheme, operands: Operands, extents: jax.Array) -> Operands:
    """Operands that all vary over the same axes, the scheme's among them."""
    operands = operands._replace(extents=extents)
    # Where types do not tell (check_vma=False) an index has none, and nothing is cast.
    indices = [lax.axis_index(axis) for axis in scheme.axes]
    axes = types.union_varying([*operands, *indices])
    return jax.tree.map(lambda x: types.cast_varying(x, axes), operands)


def _attend(
    scheme: Scheme,
    sizes: dict[str, int],
    problem: Problem,
    implementation: Implementation,
    operands: Operands,
) -> Result:
    plans = functools.partial(_plan, implementation)
    match scheme:
        case Ring(axis, layout):
            work = _work(axis, sizes[axis], layout, problem, plans)
            return ring.attend(work, operands)
        case AllGather(axis, layout):
            work = _work(axis, sizes[axis], layout, problem, plans)
            return gather.attend(work, operands)
        case Ulysses(axis, layout):
            local = _share_of_heads(problem, axis, sizes[axis])

            def whole(operands: Operands) -> Result:
                return _whole(plans(local), layout, sizes[axis], operands)

            return ulysses.attend(axis, whole, operands)
        case RingUlysses(ring_axis, ulysses_axis, layout):
            local = _share_of_heads(problem, ulysses_axis, sizes[ulysses_axis])
            work = _work(ring_axis, sizes[ring_axis], layout, local, plans)
            return ulysses.attend(ulysses_axis, functools.partial(ring.attend, work), operands)


def _plan(implementation: Implementation, problem: Problem) -> Plan:
    plan = make_plan(problem, api.current_target(), implementation)
    api._report(plan)
    return plan


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


def _work(axis: str, devices: int, layout: Layout, problem: Problem, plans: Any) -> Work:
    """A device's share, given the problem of its shards.

    Raises:
      ValueError: the shards cannot be two equal chunks.
    """
    t, s = problem.query_length, problem.key_length
    if layout == "zigzag" and (t % 2 or s % 2):
        raise ValueError(
            f"zig-zag takes two equal chunks a device, but the shards have {t} rows and {s} keys: "
            f"pad the sequences to multiples of {2 * devices}, and give their lengths"
        )
    cut = Cut(devices, layout, t, s, problem.window, problem.query_offset)
    banded = dataclasses.replace(problem, query_offset=None if problem.band else 0)
    dense = dataclasses.replace(
        problem,
        window=(UNBOUNDED, UNBOUNDED),
        query_offset=0,
        has_lengths=problem.has_lengths or cut.kind == "causal",
    )
    return Work(axis, cut, plans(banded), plans(dense))


def _whole(plan: Plan, layout: Layout, devices: int, operands: Operands) -> Result:
    """Attention with whole sequences, which Ulysses' exchange leaves in the order of shards."""
    if layout == "contiguous":
        return autodiff.attend(plan, operands)
    query, key, value = (from_zigzag(x, devices) for x in operands[:3])
    natural = operands._replace(query=query, key=key, value=value)
    output, lse = autodiff.attend(plan, natural)
    return to_zigzag(output, devices), to_zigzag(lse, devices, axis=2)
