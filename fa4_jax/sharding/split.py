"""How one call is shared out among the devices of a mesh: by batch, by heads, by sequences.

KV heads are sharded as their query heads, over as many of the mesh axes as they suffice for. Over
the others each device takes the KV heads that its query heads need from a copy of them, and dK and
dV are summed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fa4_jax.boxes import BATCH, HEADS, Boxed, Dimensions
from fa4_jax.operands import Operands, Results
from fa4_jax.plan import Plan
from fa4_jax.problem import Problem

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Split:
    """Mesh axes, major first, over which one call is shared out. Hashable.

    Attributes:
      batch, heads: axes of the batch and of the query heads.
      kv_heads: those of `heads`, from the first, that the KV heads are sharded over too.
      sequence: axes of both lengths, which context parallelism alone shards.
      pools: axes of several pools of pages, which only a vmap of `decode` has.
      axis_sizes: (name, size) of every axis of the mesh.
    """

    batch: Axes = ()
    heads: Axes = ()
    kv_heads: Axes = ()
    sequence: Axes = ()
    pools: Axes = ()
    axis_sizes: tuple[tuple[str, int], ...] = ()

    def shards(self, axes: Axes) -> int:
        """The number of parts that mesh axes cut a dimension into."""
        return shards(axes, dict(self.axis_sizes))

    @property
    def copied(self) -> Axes:
        """Axes over which query heads are sharded but KV heads are copied."""
        return self.heads[len(self.kv_heads) :]

    @property
    def query(self) -> PartitionSpec:
        """Sharding of query and output, [B, T, N, H]."""
        return spec(self.batch, self.sequence, self.heads, ())

    @property
    def key(self) -> PartitionSpec:
        """Sharding of key and value, [B, S, K, H]."""
        return spec(self.batch, self.sequence, self.kv_heads, ())

    @property
    def lse(self) -> PartitionSpec:
        """Sharding of the log-sum-exp, [B, N, T]."""
        return spec(self.batch, self.heads, self.sequence)

    def results(self, problem: Problem) -> Any:
        """Shardings of what the forward gives."""
        max_logit = spec(self.batch, self.heads) if problem.returns_max_logit else None
        return Results(self.query, self.lse, max_logit)  # type: ignore[arg-type]

    def operands(self, operands: Operands) -> Any:
        """Shardings of all operands; batch and heads of size 1 of a mask or a bias stay whole."""

        def dense(x: jax.Array) -> PartitionSpec:
            batch, heads, *_ = x.shape
            return spec(self.batch if batch > 1 else (), self.heads if heads > 1 else ())

        def of_boxes(x: jax.Array, dimensions: Dimensions) -> PartitionSpec:
            axes = {BATCH: self.batch, HEADS: self.heads}
            named = zip(x.shape, dimensions, strict=True)
            return spec(*(axes.get(name, ()) if size > 1 else () for size, name in named))

        bias = operands.bias
        bias = bias.mapped(of_boxes) if isinstance(bias, Boxed) else jax.tree.map(dense, bias)
        return operands._replace(
            query=self.query,
            key=self.key,
            value=self.key,
            extents=spec(self.batch, ()),
            bias=bias,
            mask=jax.tree.map(dense, operands.mask),
            scale=None if operands.scale is None else spec(),
            rows=jax.tree.map(lambda x: spec(self.batch if x.shape[0] > 1 else ()), operands.rows),
            soft_cap=None if operands.soft_cap is None else spec(),
            sinks=None if operands.sinks is None else spec(self.heads),
            pairs=None if operands.pairs is None else operands.pairs.mapped(of_boxes),
            bits=jax.tree.map(dense, operands.bits),
            score=None if operands.score is None else operands.score.mapped(of_boxes),
        )


def spec(*dimensions: Axes) -> Any:
    """The PartitionSpec of dimensions that are sharded over these axes."""
    return PartitionSpec(*(axes or None for axes in dimensions))


def shards(axes: Axes, sizes: Mapping[str, int]) -> int:
    """The number of parts that mesh axes of these sizes cut a dimension into."""
    return math.prod(sizes[axis] for axis in axes)


def make_split(problem: Problem, batch: Axes, heads: Axes, sizes: Mapping[str, int]) -> Split:
    """The split with KV heads on as many axes of the query heads as they suffice for.

    Raises:
      ValueError: the query heads of one device would be parts of several groups.
    """
    own = problem.query_heads // shards(heads, sizes)
    if own % problem.group and problem.group % own:
        raise ValueError(
            f"query's {problem.query_heads} heads are sharded over mesh axes {heads}: a device's "
            f"{own} would be parts of several groups of {problem.group} that share a KV head"
        )
    count = len(heads)
    while problem.kv_heads % shards(heads[:count], sizes):
        count -= 1
    return Split(batch, heads, heads[:count], axis_sizes=tuple(sizes.items()))


def own_heads(split: Split, problem: Problem, x: jax.Array) -> jax.Array:
    """KV heads that this device's query heads need, of those that it holds.

    Args:
      problem: of all devices together.
      x: this device's part of key or value, [B, S, K', H].
    """
    if not split.copied:
        return x
    heads = problem.query_heads // split.shards(split.heads)
    first = jax.lax.axis_index(split.heads) * heads // problem.group
    if split.kv_heads:
        first -= jax.lax.axis_index(split.kv_heads) * x.shape[2]
    return jax.lax.dynamic_slice_in_dim(x, first, max(1, heads // problem.group), axis=2)


def local_problem(problem: Problem, split: Split) -> Problem:
    """The attention of one device, which has the heads of `own_heads`."""
    heads = problem.query_heads // split.shards(split.heads)
    devices = split.shards(split.sequence)
    return dataclasses.replace(
        problem,
        batch=problem.batch // split.shards(split.batch),
        query_heads=heads,
        kv_heads=heads // problem.group if heads % problem.group == 0 else 1,
        query_length=problem.query_length // devices if devices > 1 else problem.query_length,
        key_length=problem.key_length // devices if devices > 1 else problem.key_length,
    )


def local_plan(plan: Plan, split: Split) -> Plan:
    """The launches of one device."""
    return dataclasses.replace(plan, problem=local_problem(plan.problem, split))
