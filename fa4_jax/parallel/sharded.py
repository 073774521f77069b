"""Context-parallel attention of whole arrays on a mesh: the shard_map around `local_attention`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from fa4_jax import api, extents, mesh_types, partition, validate
from fa4_jax.api import Call, Implementation, Numerics, Window
from fa4_jax.bands import UNBOUNDED
from fa4_jax.parallel.local import local_attention
from fa4_jax.parallel.schemes import Scheme
from fa4_jax.partition import Axes, Split
from fa4_jax.problem import Problem

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
    deterministic: bool = False,
    numerics: Numerics = "fast",
    return_residual: bool = False,
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
      scale, is_causal, local_window_size, deterministic, numerics, return_residual,
        implementation, arch: as `fa4_jax.parallel.local_attention`.

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
        deterministic=deterministic,
        numerics=numerics,
    )
    operands, problem = api.canonicalise(call)
    arrays = operands[:3]
    validate.known_sizes(problem, "fa4_jax.parallel")
    validate.flag("return_residual", return_residual)
    mesh = _find_mesh(mesh, arrays)
    split = _find_split(scheme, mesh, problem, arrays, specs, jnp.ndim(query))
    static = isinstance(query_offset, Integral)
    options = {
        "scheme": scheme,
        "scale": validate.static_scale(problem.scale),
        "is_causal": is_causal,
        "local_window_size": _hashable(local_window_size),
        "deterministic": deterministic,
        "numerics": numerics,
        "implementation": implementation,
        "arch": arch,
    }
    if static:
        options["query_offset"] = query_offset
    request = _Request(scheme, mesh, split, problem, tuple(options.items()))
    numbers = extents.checked(*lengths, query_offset, problem.batch)
    given = _given(numbers._replace(query_offset=None) if static else numbers, problem)
    output, lse = _on_mesh(request, *_padded(request, arrays, given))
    output = _cut(output, problem.query_length, axis=1)
    lse = _cut(lse, problem.query_length, axis=2)
    if jnp.ndim(query) == 3:
        output, lse = output[0], lse[0]
    return (output, lse) if return_residual else output


@dataclasses.dataclass(frozen=True)
class _Request:
    """What is static about a call. Hashable.

    Attributes:
      problem: of the whole arrays.
      options: keyword arguments of `local_attention`.
    """

    scheme: Scheme
    mesh: Any
    split: _Split
    problem: Problem
    options: tuple[tuple[str, Any], ...]

    @property
    def devices(self) -> int:
        """Devices that a sequence is shared out among."""
        return math.prod(self.mesh.shape[axis] for axis in self.scheme.axes)


@dataclasses.dataclass(frozen=True)
class _Split:
    """Mesh axes of batch, query heads, KV heads and the sequences, and the sizes of all axes."""

    batch: Axes
    heads: Axes
    kv_heads: Axes
    sequence: Axes
    sizes: tuple[tuple[str, int], ...]

    @property
    def heads_split(self) -> Split:
        """As the module that shares out heads has it."""
        return Split(self.batch, self.heads, self.kv_heads, dict(self.sizes))

    @property
    def query(self) -> PartitionSpec:
        """Of query and output, [B, T, N, H]."""
        return _spec(self.batch, self.sequence, self.heads)

    @property
    def key(self) -> PartitionSpec:
        """Of key and value, [B, S, K, H]."""
        return _spec(self.batch, self.sequence, self.kv_heads)

    @property
    def lse(self) -> PartitionSpec:
        """Of the log-sum-exp, [B, N, T]."""
        return _spec(self.batch, self.heads, self.sequence)


def _spec(*dimensions: Axes) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in dimensions))


def _given(numbers: extents.Extents, problem: Problem) -> dict[str, jax.Array]:
    """The numbers that are no part of the program, by their names as arguments, int32."""
    limits = {
        "query_seq_lengths": (numbers.query_lengths, 0, problem.query_length),
        "key_value_seq_lengths": (numbers.key_lengths, 0, problem.key_length),
        "query_offset": (numbers.query_offset, -UNBOUNDED, UNBOUNDED),
    }
    return {
        name: jnp.asarray(extents.to_int32(*limit))
        for name, limit in limits.items()
        if limit[0] is not None
    }


def _hashable(window: Any) -> Any:
    return tuple(window) if isinstance(window, list) else window


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
) -> _Split:
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
) -> _Split:
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
    split = partition.make_split(problem, batch, heads, mesh.shape)
    if not one and key[2] != heads[: len(key[2])]:
        raise ValueError(
            f"key's heads are sharded over mesh axes {key[2]}, but query's over {heads}: they "
            "must be the same, or the first of them where KV heads are too few"
        )
    return _Split(batch, heads, split.kv_heads, scheme.axes, tuple(mesh.shape.items()))


def _padded(
    request: _Request, arrays: tuple[jax.Array, ...], given: dict[str, jax.Array]
) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Lengths that the devices divide, and what says where the sequences end.

    Raises:
      ValueError: zig-zag, whose order padding would change.
    """
    problem, devices, scheme = request.problem, request.devices, request.scheme
    result = list(arrays)
    for name, length, indices in (
        ("query_seq_lengths", problem.query_length, (0,)),
        ("key_value_seq_lengths", problem.key_length, (1, 2)),
    ):
        missing = -length % devices
        if scheme.layout == "zigzag":
            chunks = math.lcm(devices, 2 * request.mesh.shape[scheme.axes[0]])
            if length % chunks:
                raise ValueError(
                    f"zig-zag over {devices} devices takes lengths that are multiples of {chunks}, "
                    f"got {length}: pad before to_zigzag, and give the sequence lengths"
                )
        elif missing:
            for i in indices:
                result[i] = jnp.pad(result[i], ((0, 0), (0, missing), (0, 0), (0, 0)))
            given = {name: jnp.full((problem.batch,), length, jnp.int32)} | given
    return tuple(result), given


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
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _on_mesh(
    request: _Request, arrays: tuple[jax.Array, ...], given: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of whole arrays whose lengths the devices divide."""
    split, mesh = request.split, request.mesh
    per_batch = {name: _spec(split.batch) if x.ndim else _spec() for name, x in given.items()}
    in_specs = ((split.query, split.key, split.key), per_batch)
    if AxisType.Explicit in mesh.axis_types:
        arrays, given = jax.tree.map(
            lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)),
            (arrays, given),
            in_specs,
        )

    def local(arrays: tuple[jax.Array, ...], given: dict[str, jax.Array]) -> Any:
        # Outside the custom derivative: the cast's transpose sums the gradients of copies.
        axes = mesh_types.union_varying([*arrays, *given.values()])
        query, key, value = (mesh_types.cast_varying(x, axes) for x in arrays)
        key, value = (
            partition.own_heads(split.heads_split, request.problem, x) for x in (key, value)
        )
        options = dict(request.options)
        return local_attention(query, key, value, return_residual=True, **given, **options)

    manual = set(_manual(mesh))
    output, lse = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(split.query, split.lse),
        axis_names=set(mesh.axis_names) - manual if manual else set(),
    )(arrays, given)
    # The name makes the result used: JAX 0.8 fails where a residual is a result that nobody uses.
    return output, checkpoint_name(lse, "fa4_jax_lse_in_mesh")
