"""Context-parallel attention of whole arrays on a mesh: the shard_map around `local_attention`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from fa4_jax import api, extents, mesh_types, validate
from fa4_jax.api import Call, Implementation, Numerics, Window
from fa4_jax.masks import Mask, resolve
from fa4_jax.masks.values import Ids
from fa4_jax.operands import Operands, Results
from fa4_jax.parallel.local import Request, attend, check_static, natural, static_offset
from fa4_jax.parallel.row_ranges import padded as padded_rows
from fa4_jax.parallel.row_ranges import unsharded, with_masks
from fa4_jax.parallel.schemes import Scheme
from fa4_jax.problem import Problem
from fa4_jax.sharding.explicit import used
from fa4_jax.sharding.split import Axes, Split, local_problem, make_split, own_heads

Specs = PartitionSpec | Sequence[PartitionSpec] | None
Dimensions = tuple[Axes, Axes, Axes, Axes]
"""Mesh axes of batch, length, heads and head_dim."""

NAMES = ("query", "key", "value")


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    scheme: Scheme,
    mesh: Mesh | AbstractMesh | None = None,
    specs: Specs = None,
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
    """`fa4_jax.attention` on a mesh whose axes share out the sequences too.

    Args:
      query, key, value: whole arrays, as `fa4_jax.attention`. In a zig-zag scheme their rows and
        keys are in zig-zag order (`to_zigzag`), and so is what is returned.
      scheme: how the devices of the sequence's mesh axes work together.
      mesh: by default that of the operands' Explicit types, else that of `jax.set_mesh`.
      specs: how [B, T, N, H] is sharded, such as P("data", "seq", "tensor"): one for query, key and
        value, or one for each. By default what the operands' Explicit types say; Auto axes show
        nothing, so there they have to be given. KV heads are sharded over as many axes of the
        query heads as they suffice for.
      query_offset, query_seq_lengths, key_value_seq_lengths: in the natural order of the sequences.
      mask, segment_ids: as `fa4_jax.attention`, but no dense mask and no tile table; arrays of
        tokens are in the order of the query's rows. A function is given positions in the natural
        order.
      sinks: [N].
      scale, is_causal, local_window_size, logits_soft_cap, deterministic, numerics,
        return_residual, return_max_logit, implementation, arch: as
        `fa4_jax.parallel.local_attention`.

    Returns:
      As `fa4_jax.attention`, sharded as query. Lengths that are no multiple of the devices are
      padded (contiguous layout) and what is returned is cut again.

    Raises:
      ValueError: an argument is wrong, or does not fit the scheme; the message says what would.
      NotImplementedError: as `fa4_jax.attention`.
    """
    lengths = query_seq_lengths, key_value_seq_lengths
    call = Call(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=lengths[0],
        key_value_seq_lengths=lengths[1],
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_max_logit=return_max_logit,
        deterministic=deterministic,
        numerics=numerics,
    )
    operands, problem = api.canonicalise(call)
    check_static(problem)
    masked = dataclasses.replace(call, mask=mask, segment_ids=segment_ids)
    validate.flag("return_residual", return_residual)
    validate.choice("implementation", implementation, validate.IMPLEMENTATIONS)
    found = _find_mesh(mesh, operands[:3])
    split = _find_split(scheme, found, problem, operands[:3], specs, jnp.ndim(query))
    sizes = tuple((axis, found.shape[axis]) for axis in scheme.axes)
    request = Request(scheme, sizes, static_offset(query_offset), implementation, arch)
    tokens = resolve.Tokens(whole=lambda x: natural(scheme, sizes, unsharded(x)))
    numbers = extents.checked(*lengths, query_offset, problem.batch)
    problem, operands = with_masks(problem, operands, masked, numbers, tokens)
    padded, operands = _padded(request, problem, operands._replace(offset=None))
    results = _on_mesh(request, found, split, padded, operands)
    output = _cut(results.output, problem.query_length, axis=1)
    lse = _cut(results.lse, problem.query_length, axis=2)
    results = results._replace(output=output, lse=lse)
    return api.returned(results, jnp.ndim(query), return_residual)


def _find_mesh(mesh: Any, arrays: tuple[jax.Array, ...]) -> Any:
    """The mesh given, of the types, or of the context.

    Raises:
      ValueError: there is none.
    """
    current = jax.sharding.get_abstract_mesh()
    found = mesh or mesh_types.explicit_mesh(arrays) or current
    if found.empty:
        raise ValueError("there is no mesh: pass mesh=, or call within jax.set_mesh(mesh)")
    return current if current.manual_axes else found


def _manual(mesh: Any) -> tuple[str, ...]:
    """Axes that an enclosing shard_map has taken."""
    return tuple(getattr(mesh, "abstract_mesh", mesh).manual_axes)


def _find_split(
    scheme: Scheme,
    mesh: Any,
    problem: Problem,
    arrays: tuple[jax.Array, ...],
    specs: Specs,
    rank: int,
) -> Split:
    """How batch, heads and sequences are shared out.

    Raises:
      ValueError: the scheme's axes are not to be had, or the specs do not fit it or each other.
    """
    for axis in scheme.axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"the scheme's axis {axis!r} is not in the mesh, which has "
                f"{', '.join(map(repr, mesh.axis_names))}"
            )
        if axis in _manual(mesh):
            raise ValueError(
                f"the scheme's axis {axis!r} is manual here, inside a shard_map: "
                "call fa4_jax.parallel.local_attention on the shards"
            )
    if specs is not None:
        each = (specs,) * 3 if isinstance(specs, PartitionSpec) else tuple(specs)
        if len(each) != 3:
            raise ValueError(f"specs must be one PartitionSpec or three, got {specs}")
        dimensions = [_dimensions(name, x, rank) for name, x in zip(NAMES, each, strict=True)]
    elif mesh_types.explicit_mesh(arrays) is not None:
        dimensions = [tuple(mesh_types.explicit_axes(x)) for x in arrays]
    else:
        raise ValueError(
            "specs must be given on a mesh of Auto axes, which show no shardings: "
            f"for example specs=PartitionSpec('data', {scheme.axes!r}, 'tensor')"
        )
    one = isinstance(specs, PartitionSpec)
    return _checked_split(scheme, mesh, problem, dimensions, one)


def _dimensions(name: str, spec: PartitionSpec, rank: int) -> Dimensions:
    """A spec as tuples of mesh axes, for rank 4.

    Raises:
      ValueError: it has too many entries.
    """
    if len(spec) > rank:
        raise ValueError(f"{name}'s spec {spec} has more entries than its {rank} dimensions")
    entries = [*(None,) * (4 - rank), *spec, *(None,) * (rank - len(spec))]
    b, t, n, h = (() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
    return b, t, n, h


def _checked_split(
    scheme: Scheme, mesh: Any, problem: Problem, dimensions: Sequence[Any], one: bool
) -> Split:
    """The split that the dimensions of query, key and value ask for.

    Args:
      one: a single spec was given: KV heads follow the query's.

    Raises:
      ValueError: as `_find_split`.
    """
    for name, (_, length, _, head_dim) in zip(NAMES, dimensions, strict=True):
        if head_dim:
            raise ValueError(
                f"{name} is sharded along its head_dim, over mesh axis "
                f"{' and '.join(map(repr, head_dim))}: shard its heads instead"
            )
        if length != scheme.axes:
            raise ValueError(
                f"{name} is sharded along its length over mesh axes {length}, but {scheme} takes "
                f"it over {scheme.axes}: reshard it, or choose the scheme for these axes"
            )
    (batch, _, heads, _), key, value = dimensions
    if key != value:
        raise ValueError(
            f"key and value are sharded differently, over {key} and {value} "
            "(batch, length, heads, head_dim): reshard one of them as the other"
        )
    if key[0] != batch:
        raise ValueError(
            f"query's batch is sharded over mesh axes {batch}, but key's over {key[0]}: "
            "reshard one of them as the other"
        )
    for axis in (*batch, *heads):
        if axis not in mesh.shape:
            raise ValueError(
                f"specs name the axis {axis!r}, which is not in the mesh, which has "
                f"{', '.join(map(repr, mesh.axis_names))}"
            )
    for name, count, axes in (
        ("batch", problem.batch, batch),
        ("heads", problem.query_heads, heads),
    ):
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if count % shards:
            raise ValueError(
                f"query's {name} of {count} cannot be shared out among the {shards} devices of "
                f"mesh axes {axes}"
            )
    split = make_split(problem, batch, heads, mesh.shape)
    if not one and key[2] != heads[: len(key[2])]:
        raise ValueError(
            f"key's heads are sharded over mesh axes {key[2]}, but query's over {heads}: they "
            "must be the same, or the first of them where KV heads are too few"
        )
    return dataclasses.replace(split, sequence=scheme.axes)


def _padded(request: Request, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """The call with lengths that the devices divide; the extents say where the sequences end.

    Raises:
      ValueError: the layout is zig-zag, whose order padding would change.
    """
    scheme, devices = request.scheme, request.devices
    lengths = {"query_length": problem.query_length, "key_length": problem.key_length}
    if scheme.layout == "zigzag":
        chunks = math.lcm(devices, 2 * request.size(scheme.axes[0]))
        for length in lengths.values():
            if length % chunks:
                raise ValueError(
                    f"zig-zag over {devices} devices takes lengths that are multiples of {chunks}, "
                    f"got {length}: pad before to_zigzag, and give the sequence lengths"
                )
    padded = {name: length + -length % devices for name, length in lengths.items()}
    if padded == lengths:
        return problem, operands

    def pad(x: jax.Array, length: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))

    operands = operands._replace(
        query=pad(operands.query, padded["query_length"]),
        key=pad(operands.key, padded["key_length"]),
        value=pad(operands.value, padded["key_length"]),
        rows=padded_rows(operands.rows, **padded),
        pairs=None if operands.pairs is None else operands.pairs.padded(*padded.values()),
    )
    return dataclasses.replace(problem, has_lengths=True, **padded), operands


def _cut(x: jax.Array, length: int, axis: int) -> jax.Array:
    """The first of an axis that may have been padded."""
    if x.shape[axis] == length:
        return x
    mesh = mesh_types.explicit_mesh(x)
    if mesh is not None:
        # A length that the devices do not divide cannot be sharded.
        spec = [*jax.typeof(x).sharding.spec]
        spec[axis] = None
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


# Jitted because types hold no devices: eagerly, shard_map would need them.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _on_mesh(
    request: Request, mesh: Any, split: Split, problem: Problem, operands: Operands
) -> Results:
    """Output, log-sum-exp and largest scores of whole arrays whose lengths the devices divide."""
    specs = split.operands(operands)
    if AxisType.Explicit in mesh.axis_types:
        operands = jax.tree.map(
            lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), operands, specs
        )

    def local(operands: Operands) -> Any:
        # Outside the custom derivative: the cast's transpose sums the gradients of copies.
        axes = mesh_types.union_varying(operands)
        operands = jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), operands)
        key, value = (own_heads(split, problem, x) for x in (operands.key, operands.value))
        own = operands._replace(key=key, value=value)
        return attend(request, local_problem(problem, split), own)

    manual = set(_manual(mesh))
    results = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=split.results(problem),
        axis_names=set(mesh.axis_names) - manual if manual else set(),
    )(operands)
    return results._replace(lse=used(results.lse))
