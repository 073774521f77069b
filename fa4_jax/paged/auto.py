"""The kernels' launches of `decode`, and a rule by which Auto mesh axes share them out.

All operands but sinks and soft cap have one more axis, which comes first: of pools of pages. A vmap
over pools has several, which lie on the devices on which the mapped axis does.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from fa4_jax import launches, log
from fa4_jax.operands import Operands, Results
from fa4_jax.paged.problem import PagedOperands
from fa4_jax.plan import Plan
from fa4_jax.sharding.auto import Sharing, auto_split, mesh_axes, partitioned
from fa4_jax.sharding.split import Split, own_heads, spec


def forward(plan: Plan, operands: PagedOperands) -> Results:
    """Output [V, B, T, N, H] and log-sum-exp [V, B, N, T] of V pools, by the kernels.

    Pools, batch and heads are partitioned on Auto mesh axes.
    """
    problem = plan.problem

    def local(split: Split, operands: PagedOperands) -> Results:
        own = _in_one_pool(operands)
        key, value = (own_heads(split, problem, x) for x in (own.key_pages, own.value_pages))
        (batch, _, heads, _), kv_heads = own.query.shape, key.shape[2]
        sized = plan.resized(batch=batch, query_heads=heads, kv_heads=kv_heads)
        arrays = Operands(
            *(own.query, key, value, own.extents),
            soft_cap=operands.soft_cap,
            sinks=operands.sinks,
        )
        found = launches.forward(sized, arrays, own.page_table)
        output, lse = (
            x.reshape(*operands.query.shape[:2], *x.shape[1:]) for x in (found.output, found.lse)
        )
        return Results(output, lse)

    def split(mesh: Mesh, args: tuple[Any, ...]) -> Split:
        (own,) = args
        _tell_of_gathering(mesh, own)
        rows = (own.query, own.page_table, own.extents)
        pages = (own.key_pages, own.value_pages)
        return auto_split(
            *(problem, mesh),
            batch=[(x, 1) for x in rows],
            heads=[(own.query, 3), *((x, 3) for x in pages)],
            pools=[(x, 0) for x in (*rows, *pages)],
        )

    def specs(split: Split, _: tuple[Any, ...]) -> tuple[Any, Any]:
        query = spec(split.pools, split.batch, (), split.heads)
        pages, rows = spec(split.pools, (), (), split.kv_heads), spec(split.pools, split.batch)
        own: Any = PagedOperands(
            *(query, pages, pages, rows, rows),
            soft_cap=None if operands.soft_cap is None else spec(),
            sinks=None if operands.sinks is None else spec(split.heads),
        )
        lse = spec(split.pools, split.batch, split.heads)
        results: Any = Results(query, lse)
        return (own,), results

    sharing = Sharing(_rule(problem.group, operands), split, specs)
    return partitioned(local, sharing)(operands)


def _rule(group: int, operands: PagedOperands) -> str:
    """Shardy's rule: a pools, b batch, n and k heads, which are one where there are as many."""
    k = "n" if group == 1 else "k"
    cap = [] if operands.soft_cap is None else [""]
    sinks = [] if operands.sinks is None else ["n"]
    taken = ("a b t n h", f"a p s {k} h", f"a p s {k} v", "a b m", "a b e", *cap, *sinks)
    return f"{', '.join(taken)} -> a b t n v, a b n t"


def _in_one_pool(operands: PagedOperands) -> PagedOperands:
    """The operands without the axis of pools, which are laid one after another."""
    pools, pages = operands.key_pages.shape[:2]
    table = operands.page_table
    if pools > 1:
        first = jax.lax.broadcasted_iota(table.dtype, table.shape, 0) * pages
        table = table.clip(0, pages - 1) + first
    own = operands._replace(page_table=table, soft_cap=None, sinks=None)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own)


def _tell_of_gathering(mesh: Mesh, operands: PagedOperands) -> None:
    """Says once that pages are gathered, and what gathers none."""
    if axes := mesh_axes(mesh, operands.key_pages, 1):
        log.warn_once(
            f"key_pages {operands.key_pages.shape[1:]} are sharded along their pages, over mesh "
            f"axis {' and '.join(map(repr, axes))}: every device gathers them whole; "
            "fa4_jax.parallel.local_decode works on the shards"
        )
