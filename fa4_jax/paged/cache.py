"""A cache of keys and values in pages: which page holds which tokens, and how tokens get there.

A page is free if no entry's table names it among the pages that its length needs. So tables and
lengths are the whole state: nothing counts references, and what several entries share is simply
named by several tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fa4_jax import validate
from fa4_jax.extents import to_int32
from fa4_jax.paged.scatter import written
from fa4_jax.paged.shard import Shard, shard_of

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of a batch of sequences, in pages that they share out among themselves.

    A pytree of arrays of fixed shapes: it can be donated to a jitted step, carried by
    `lax.while_loop`, and sharded like any other. Every method returns a new cache; inside jit XLA
    updates the pages in place. Lengths may be set back (`dataclasses.replace`, for drafts that were
    rejected), but not into pages that entries share.

        cache = PagedCache.empty(4, num_pages=256, max_pages=64, page_size=64, layers=2, ...)
        cache = cache.grow(1)                                  # once a step
        cache = cache.append(layer, key, value)                # in each layer, [B, 1, K, H]
        output = decode(query, *cache.pages(layer), cache.page_table, cache.lengths)

    Attributes:
      key_pages, value_pages: of each layer, [P, page, K, H].
      page_table: int32 [B, M], the pages of each entry in the order of its tokens.
      lengths: int32 [B], tokens of each entry.
      is_exhausted: bool [B], True for an entry that needed a page when there was none, or whose
        table was full: tokens of it were dropped, and what is computed of it is void.
      axis: mesh axis over whose devices the pages of each sequence are dealt out, for
        `fa4_jax.parallel.local_decode`; static. Each device then has pages and table of its own.
    """

    key_pages: tuple[Array, ...]
    value_pages: tuple[Array, ...]
    page_table: Array
    lengths: Array
    is_exhausted: Array
    axis: str | None = dataclasses.field(default=None, metadata={"static": True})

    @staticmethod
    def empty(
        batch: int,
        *,
        num_pages: int,
        max_pages: int,
        page_size: int,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: Any = jnp.bfloat16,
        axis: str | None = None,
    ) -> PagedCache:
        """A cache without tokens.

        Args:
          batch: entries, B.
          num_pages: pages of each layer, P.
          max_pages: pages that one entry can have, M.
          page_size: tokens of a page.
          layers: of the model; all use the same table.
          heads, head_dim: KV heads K, and H of keys and values.
          dtype: of the pages.
          axis: as the field. Sizes are then those of one device: create it inside shard_map.

        Raises:
          ValueError: a size is no int >= 1.
        """
        sizes = {
            "batch": batch,
            "num_pages": num_pages,
            "max_pages": max_pages,
            "page_size": page_size,
            "layers": layers,
            "heads": heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an int >= 1, got {size!r}")
        shape = (num_pages, page_size, heads, head_dim)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(layers)) for _ in range(2))
        table, lengths = jnp.zeros((batch, max_pages), jnp.int32), jnp.zeros(batch, jnp.int32)
        return PagedCache(keys, values, table, lengths, jnp.zeros(batch, bool), axis)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.key_pages[0].shape[1]

    @property
    def num_pages(self) -> int:
        """Pages of each layer, P."""
        return self.key_pages[0].shape[0]

    def pages(self, layer: int) -> tuple[Array, Array]:
        """Key and value pages of a layer, [P, page, K, H]."""
        return self.key_pages[layer], self.value_pages[layer]

    def grow(self, tokens: ArrayLike) -> PagedCache:
        """The cache with room for more tokens, which `append` then writes, layer by layer.

        Args:
          tokens: an integer, or integers [B]: how many each entry gets; negative ones count as 0.

        Raises:
          ValueError: the tokens are no integers of this shape; or, outside jit, pages are lacking
            (inside, `is_exhausted` says so).
        """
        batch, entries = self.page_table.shape
        counts = to_int32(validate.token_counts("tokens", tokens, batch), 0, _MOST_TOKENS)
        lengths = jnp.minimum(self.lengths + jnp.broadcast_to(counts, (batch,)), _MOST_TOKENS)
        has, needs = self._pages_of(self.lengths), self._pages_of(lengths)
        taken = jnp.minimum(needs, entries) - jnp.minimum(has, entries)
        # Page number i of entry b is the free page of this rank: entries are served in turn.
        entry = jnp.arange(entries)[None, :]
        rank = (jnp.cumsum(taken) - taken - has)[:, None] + entry
        is_new = (entry >= has[:, None]) & (entry < needs[:, None])
        table = jnp.where(is_new, self._free_page(rank), self.page_table)
        lost = (needs > entries) | (is_new & (table >= self.num_pages)).any(1)
        grown = dataclasses.replace(self, page_table=table, lengths=lengths)
        return grown._marked(lost)

    def append(
        self,
        layer: int,
        key: ArrayLike,
        value: ArrayLike,
        query_lengths: ArrayLike | None = None,
    ) -> PagedCache:
        """The cache with keys and values of its last tokens, which `grow` has made room for.

        Args:
          layer: whose pages.
          key, value: [B, T, K, H], of the pages' dtype. Float8 pages take what was divided by the
            scales that `decode` is given.
          query_lengths: integers [B], T by default: row i of entry b is token lengths[b] -
            query_lengths[b] + i; rows from query_lengths[b] on are padding, as in `decode`.

        Raises:
          ValueError: an argument is wrong; its name and value are in the message.
        """
        batch, page = self.lengths.shape[0], self.page_size
        validate.index("layer", layer, len(self.key_pages))
        arrays = [jnp.asarray(x) for x in (key, value)]
        for name, x, pages in zip(("key", "value"), arrays, self.pages(layer), strict=True):
            _check_rows(name, x, pages, batch)
        rows = arrays[0].shape[1]
        if arrays[1].shape[1] != rows:
            raise ValueError(f"value has {arrays[1].shape[1]} rows but key has {rows}")
        counts = validate.lengths("query_lengths", query_lengths, batch)
        own = jnp.full_like(self.lengths, rows) if counts is None else to_int32(counts, 0, rows)
        row = jnp.arange(rows)[None, :]
        token = (self.lengths - own)[:, None] + row
        is_written = (token >= 0) & (row < jnp.asarray(own)[:, None])
        number, slot = self._number(jnp.maximum(token, 0) // page), token % page
        number = jnp.where(is_written, number, self.num_pages)
        keys, values = (
            tuple(
                written(pages, (number, slot), x) if i == layer else pages
                for i, pages in enumerate(every)
            )
            for every, x in zip((self.key_pages, self.value_pages), arrays, strict=True)
        )
        return dataclasses.replace(self, key_pages=keys, value_pages=values)

    def reorder(self, parents: ArrayLike) -> PagedCache:
        """The cache whose entry b continues the sequence of entry parents[b], for beams.

        Full pages are shared. Of a last page that is not full every entry but one gets a copy.

        Args:
          parents: integers [B], clamped to [0, B - 1].

        Raises:
          ValueError: no integers of this shape; or pages are lacking, as `grow`.
        """
        batch, entries = self.page_table.shape
        checked = validate.lengths("parents", parents, batch)
        if checked is None:
            raise ValueError("parents must be integers [B], got None")
        parent = jnp.asarray(to_int32(checked, 0, batch - 1))
        table, lengths = self.page_table[parent], self.lengths[parent]
        moved = dataclasses.replace(
            self, page_table=table, lengths=lengths, is_exhausted=self.is_exhausted[parent]
        )
        last = lengths // self.page_size  # the page that is not full
        is_first = jnp.argmax(parent[:, None] == parent[None, :], axis=1) == jnp.arange(batch)
        is_copied = (lengths % self.page_size != 0) & ~is_first & self._shard.holds(last)
        target = moved._free_page(jnp.cumsum(is_copied) - is_copied)
        target = jnp.where(is_copied, target, self.num_pages)
        source = jnp.minimum(moved._number(last), self.num_pages - 1)
        keys, values = (
            tuple(written(x, (target,), x[source]) for x in every)
            for every in (self.key_pages, self.value_pages)
        )
        at = jnp.where(is_copied, last // self._shard.devices, entries)
        table = table.at[jnp.arange(batch), at].set(target, mode="drop")
        moved = dataclasses.replace(moved, key_pages=keys, value_pages=values, page_table=table)
        return moved._marked(is_copied & (target >= self.num_pages))

    def release(self, is_finished: ArrayLike) -> PagedCache:
        """The cache without the tokens of finished entries, whose pages are free for others.

        Args:
          is_finished: bool [B].

        Raises:
          ValueError: another type or shape.
        """
        done = jnp.asarray(is_finished)
        if done.shape != self.lengths.shape or done.dtype != jnp.bool_:
            raise ValueError(
                f"is_finished must be bool [B] = {self.lengths.shape}, got {done.dtype}"
                f"{list(done.shape)}"
            )
        lengths = jnp.where(done, 0, self.lengths)
        return dataclasses.replace(self, lengths=lengths, is_exhausted=self.is_exhausted & ~done)

    @property
    def _shard(self) -> Shard:
        return shard_of(self.axis)

    def _pages_of(self, tokens: Array) -> Array:
        """Table entries that sequences of `tokens` [B] tokens need, [B]."""
        return self._shard.pages(-(-tokens // self.page_size))

    def _number(self, page: Array) -> Array:
        """Page numbers of pages of the sequences, [B] or [B, ...]; P where there is none here."""
        batch, entries = self.page_table.shape
        entry = (page // self._shard.devices).reshape(batch, -1)
        found = jnp.take_along_axis(self.page_table, entry, 1, mode="fill", fill_value=0)
        is_here = self._shard.holds(page) & (entry < entries).reshape(page.shape)
        return jnp.where(is_here, found.reshape(page.shape), self.num_pages)

    def _free_page(self, rank: Array) -> Array:
        """The free page of a rank among all free ones; P where there are not as many."""
        entry = jnp.arange(self.page_table.shape[1])[None, :]
        is_used = entry < self._pages_of(self.lengths)[:, None]
        used = jnp.where(is_used, self.page_table, self.num_pages)
        is_free = jnp.ones(self.num_pages, bool).at[used].set(False, mode="drop")
        (free,) = jnp.nonzero(is_free, size=self.num_pages, fill_value=self.num_pages)
        found = free.astype(jnp.int32).at[rank].get(mode="fill", fill_value=self.num_pages)
        return jnp.where(rank < 0, self.num_pages, found)

    def _marked(self, lost: Array) -> PagedCache:
        """The cache in which entries that lost tokens, bool [B], are marked.

        Raises:
          ValueError: there is one, and this is known now.
        """
        if self.axis is not None:
            lost = lax.pmax(lost.astype(jnp.int32), self.axis) > 0
        if validate.is_static(lost) and bool(lost.any()):
            raise ValueError(
                f"entries {jnp.flatnonzero(lost).tolist()} need more pages than there are: of "
                f"num_pages={self.num_pages} none is free, or they need more than "
                f"max_pages={self.page_table.shape[1]}; lengths would be {self.lengths.tolist()}"
            )
        return dataclasses.replace(self, is_exhausted=self.is_exhausted | lost)


_MOST_TOKENS = 2**29
"""Lengths stop here, far beyond any table, lest they overflow."""


def _check_rows(name: str, x: Array, pages: Array, batch: int) -> None:
    """What is appended against the pages.

    Raises:
      ValueError: it does not fit them.
    """
    if x.ndim != 4 or x.shape[0] != batch or x.shape[2:] != pages.shape[2:]:
        expected = f"({batch}, T, {pages.shape[2]}, {pages.shape[3]})"
        raise ValueError(f"{name} must have shape [B, T, K, H] = {expected}, got {x.shape}")
    if x.dtype != pages.dtype:
        raise ValueError(f"{name} has dtype {x.dtype} but the pages have {pages.dtype}")
