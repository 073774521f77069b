"""Masks of pairs as packed bits and states of small boxes: what kernels read of them.

The bits of 64 rows and 32 keys are 64 words side by side, so that a warp of any kernel reads whole
sectors of memory, whether its lanes are rows (the forward) or keys (the transposed scores of the
backward). A bit of `some` and of `every` stands for 64 rows and 16 keys: whether any of these
pairs, or all of them, are seen. Every tile of a kernel consists of such boxes. [T, S] is never held
as bools, unless the caller gave it so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fa4_jax.bands import UNBOUNDED
from fa4_jax.boxes import ANY, BATCH, HEADS, ROWS, Box
from fa4_jax.masks.pairs import Dense, Pairs, every
from fa4_jax.masks.table import TILE_ROWS
from fa4_jax.operands import MaskBits, Operands

Array = jax.Array

BOX_ROWS, BOX_KEYS = 64, 16
"""Rows and keys of a bit of `MaskBits.some` and `every`."""

WORD = 32
TILE_WORDS = 4
"""Words of 128 keys, of which there are whole ones, as the backward's tiles of keys read them."""

PAIRS_AT_ONCE = 2**26
"""Pairs of which bools may be in flight, over batch and heads, while bits are made."""

LIMIT_BYTES = 2**30
"""Bytes of bits that a call may hold: 92k x 92k pairs of one batch entry and head."""


class _Box(NamedTuple):
    row: Any
    rows: int
    key: Any
    keys: int


def _ceil(length: Any, size: int) -> Any:
    return -(-length // size)


def shape(pairs: Pairs, query_length: Any, key_length: Any) -> tuple[Any, ...]:
    """Shape of the words: [B|1, N|1, ceil(T / 64), 4 ceil(S / 128), 64]."""
    batch, heads = _leading(pairs)
    words = TILE_WORDS * _ceil(key_length, TILE_WORDS * WORD)
    return (batch, heads, _ceil(query_length, BOX_ROWS), words, BOX_ROWS)


def _leading(pairs: Pairs) -> tuple[int, int]:
    """B|1 and N|1 of what a mask says, without computing it."""
    one = _Box(0, 1, 0, 1)
    return jax.eval_shape(lambda x: x.seen(one), pairs).shape[:2]


def heads_of(pairs: Pairs | None, bits: MaskBits | None) -> int:
    """The number of heads that have a mask of their own; 1 if all share it, or without one."""
    if bits is not None:
        return bits.words.shape[1]
    return 1 if pairs is None else _leading(pairs)[1]


def num_bytes(pairs: Pairs, query_length: int, key_length: int) -> int:
    """Bytes of the words."""
    return 4 * math.prod(shape(pairs, query_length, key_length))


def limited(pairs: Pairs, query_length: int, key_length: int) -> None:
    """Checks how many bytes the bits of a mask take.

    Raises:
      NotImplementedError: more than LIMIT_BYTES, or lengths are symbolic (`jax.export`).
    """
    if not (isinstance(query_length, int) and isinstance(key_length, int)):
        raise NotImplementedError(
            "mask: a dense array or function takes no symbolic lengths on the kernels, got "
            f"({query_length}, {key_length}); masks.ranges, segments, prefix, chunked and window do"
        )
    size = num_bytes(pairs, query_length, key_length)
    if size > LIMIT_BYTES:
        batch, heads = _leading(pairs)
        raise NotImplementedError(
            f"mask: its bits for {batch} batch entries, {heads} heads and {query_length} x "
            f"{key_length} pairs are {size} bytes, the limit is {LIMIT_BYTES}: causality, "
            "local_window_size, segment_ids and masks.ranges, prefix, chunked, block_causal cost "
            "O(length); a mask that all heads or batch entries share is held once; "
            "implementation='xla' holds no bits of a function"
        )


def pack(pairs: Pairs, query_length: int, key_length: int) -> MaskBits:
    """Bits and states of a mask, by blocks of rows."""
    batch, heads, tiles, words, _ = shape(pairs, query_length, key_length)
    of_tile = batch * heads * BOX_ROWS * words * WORD
    at_once = max(1, min(tiles, PAIRS_AT_ONCE // of_tile))
    if isinstance(pairs, Dense):  # The bools are there, and a loop is slower by two fifths.
        at_once = tiles
    blocks = -(-tiles // at_once)
    rows = at_once * BOX_ROWS
    padded = pairs.padded(blocks * rows, words * WORD)
    is_whole = (query_length, key_length) == (blocks * rows, words * WORD)
    in_memory = (
        is_whole and isinstance(pairs, Dense) and pairs.array.shape[2:] == (rows, key_length)
    )

    def block(index: Any) -> tuple[Array, Array, Array]:
        box = _Box(index * rows, rows, 0, words * WORD)
        seen = jnp.broadcast_to(padded.seen(box), (batch, heads, rows, words * WORD))
        row = index * rows + jnp.arange(rows, dtype=jnp.int32)
        key = jnp.arange(words * WORD, dtype=jnp.int32)
        if not is_whole:
            inside = (row < query_length)[:, None] & (key < key_length)[None]
            seen &= inside[None, None]
        absent = (row >= query_length).reshape(1, 1, at_once, 1, BOX_ROWS)
        return _packed(seen, absent, _joined_in_memory if in_memory else _joined)

    if blocks == 1:
        return _with_visits(block(0))
    found = lax.map(block, jnp.arange(blocks, dtype=jnp.int32))

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(batch, heads, blocks * at_once, *x.shape[4:])[:, :, :tiles]

    return _with_visits(jax.tree.map(joined, found))


def _packed(
    seen: Array, absent: Array, join: Callable[[Array], Array]
) -> tuple[Array, Array, Array]:
    """Words and states of bool [B|1, N|1, 64 tiles, 32 words].

    Args:
      absent: rows past the query length, [1, 1, tiles, 1, 64], which hide nothing.
      join: makes a word of 32 bools, as `_joined`.
    """
    batch, heads, rows, keys = seen.shape
    tiles, words = rows // BOX_ROWS, keys // WORD
    found = join(seen.reshape(batch, heads, tiles, BOX_ROWS, words, WORD)).swapaxes(-1, -2)
    some = lax.reduce(found, np.uint32(0), lax.bitwise_or, (4,))
    ones = np.uint32(2**32 - 1)
    all_seen = lax.reduce(jnp.where(absent, ones, found), ones, lax.bitwise_and, (4,))
    return (
        lax.bitcast_convert_type(found, jnp.int32),
        _states(some, lambda half: half != 0),
        _states(all_seen, lambda half: half == 2**BOX_KEYS - 1),
    )


def _with_visits(packed: tuple[Array, Array, Array]) -> MaskBits:
    """Adds to words and states what follows from the states."""
    words, some, every = packed
    of_entries = split_states(_grouped(some, 2, TILE_ROWS // BOX_ROWS, 0, lax.bitwise_or))
    box = lax.broadcasted_iota(jnp.int32, of_entries.shape, 3)
    low = jnp.where(of_entries, box, UNBOUNDED // BOX_KEYS).min(-1) * BOX_KEYS
    high = (jnp.where(of_entries, box, -1).max(-1) + 1) * BOX_KEYS
    row_boxes = lax.population_count(some).sum(-1)
    key_boxes = split_states(some).sum(2, dtype=jnp.int32)
    return MaskBits(words, some, every, jnp.stack((low, high), -1), row_boxes, key_boxes)


def _states(words: Array, holds: Callable[[Array], Array]) -> Array:
    """A bit for each half of a word, int32 [..., ceil(words / 16)]."""
    halves = jnp.stack((words & (2**BOX_KEYS - 1), words >> BOX_KEYS), axis=-1)
    bits = holds(halves).reshape(*words.shape[:-1], 2 * words.shape[-1])
    widths = [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % WORD)]
    bits = jnp.pad(bits, widths)
    found = _joined(bits.reshape(*bits.shape[:-1], bits.shape[-1] // WORD, WORD))
    return lax.bitcast_convert_type(found, jnp.int32)


def _joined(bits: Array) -> Array:
    """bool [..., 32] as uint32 [...], the first one lowest.

    They become bytes first: a GPU reads rows of eight bools twice as fast as rows of 32.
    """
    octets = bits.reshape(*bits.shape[:-1], WORD // 8, 8)
    place = lax.broadcasted_iota(jnp.uint32, octets.shape, octets.ndim - 1)
    return _of_bytes((octets.astype(jnp.uint32) << place).sum(-1, dtype=jnp.uint32))


def _joined_in_memory(bits: Array) -> Array:
    """`_joined` of an array in memory.

    A sum is one thread's, so XLA loads its eight bools at once; of bools that are computed, or lie
    at odd places, it would compute or load each by itself, which takes up to three times as long as
    `_joined` (benchmarks/results/nvidia-h200-masks-of-pairs.md).
    """
    octets = bits.reshape(*bits.shape[:-1], WORD // 8, 8).astype(jnp.uint8)
    terms = (octets[..., place] << place for place in range(8))
    return _of_bytes(functools.reduce(operator.or_, terms))


def _of_bytes(found: Array) -> Array:
    """Bytes [..., 4] as uint32 [...]; the barrier keeps XLA from reading a word byte by byte."""
    return lax.bitcast_convert_type(lax.optimization_barrier(found.astype(jnp.uint8)), jnp.uint32)


def split_states(states: Array) -> Array:
    """The bits of `some` or `every` one by one, bool [..., boxes]."""
    place = jnp.arange(WORD, dtype=jnp.int32)
    bits = (states[..., None] >> jnp.expand_dims(place, range(states.ndim))) & 1
    return bits.reshape(*states.shape[:-1], states.shape[-1] * WORD) != 0


def keys_of_tiles(bits: MaskBits, size: int) -> Array:
    """Keys that a row of each tile of `size` rows visits in the mean: int32 [B|1, tiles]."""
    boxes = _grouped(bits.row_boxes.sum(1), 1, size // BOX_ROWS, 0, lax.add)
    return boxes * BOX_KEYS // (size // BOX_ROWS * bits.row_boxes.shape[1])


def rows_of_tiles(bits: MaskBits, size: int, tiles: int) -> Array:
    """Rows that a key of each tile of `size` keys is visited by: int32 [B|1, tiles]."""
    boxes = _grouped(bits.key_boxes.sum(1), 1, size // BOX_KEYS, 0, lax.add)[:, :tiles]
    return boxes * BOX_ROWS // (size // BOX_KEYS * bits.key_boxes.shape[1])


def narrowed(table: Array, bits: MaskBits) -> Array:
    """A tile table [B|1, ceil(T / 128), 4] whose visits lie within what a mask of pairs shows.

    The third and fourth column, by which a block needs no limits, stay.
    """
    low = jnp.maximum(table[..., 0], bits.limits[..., 0].min(1))
    high = jnp.minimum(table[..., 1], bits.limits[..., 1].max(1))
    rest = (jnp.broadcast_to(table[..., i], low.shape) for i in (2, 3))
    found = jnp.stack((low, high, *rest), axis=-1)
    return jnp.where((low < high)[..., None], found, 0)


def _grouped(x: Array, axis: int, size: int, init: int, join: Any) -> Array:
    """Groups of `size` along an axis joined; the last one may be shorter."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, widths, constant_values=init)
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return lax.reduce(x, np.int32(init), join, (axis + 1,))


def of_groups(bits: MaskBits, kv_heads: int) -> MaskBits:
    """States of the heads of each KV head together: [B|1, 1 or K, ...]; the words stay.

    A backward visits the rows of all heads of a group in the same order.
    """
    heads = bits.some.shape[1]
    if heads in (1, kv_heads):
        return bits

    return bits._replace(
        some=_grouped(bits.some, 1, heads // kv_heads, 0, lax.bitwise_or),
        every=_grouped(bits.every, 1, heads // kv_heads, -1, lax.bitwise_and),
    )


def _mask(operands: Operands) -> Pairs | None:
    """The mask of pairs of a call whose bits have not been made."""
    found: list[Pairs] = [Dense(operands.mask)] if operands.mask is not None else []
    return every(found + ([operands.pairs] if operands.pairs is not None else []))


def shape_of(operands: Operands) -> tuple[Any, ...] | None:
    """Shape of the words that kernels would read of a call's mask, or None without one."""
    if operands.bits is not None:
        return operands.bits.words.shape
    mask = _mask(operands)
    return None if mask is None else shape(mask, operands.query.shape[1], operands.key.shape[1])


def of_operands(operands: Operands) -> MaskBits | None:
    """Bits of the mask of pairs that a call has, made if need be; None without one.

    Raises:
      NotImplementedError: as `limited`.
    """
    if operands.bits is not None:
        return operands.bits
    mask = _mask(operands)
    if mask is None:
        return None
    lengths = operands.query.shape[1], operands.key.shape[1]
    limited(mask, *lengths)
    return pack(mask, *lengths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed(Pairs):
    """A mask read from its bits, row by row: words int32 [B|1, N|1, T or more, S / 32 or more]."""

    DIMENSIONS: ClassVar = {"words": (BATCH, HEADS, ROWS, ANY)}
    words: Array

    def seen(self, box: Box) -> Array:
        words = lax.dynamic_slice_in_dim(self.words, box.row, box.rows, 2)
        key = lax.iota(jnp.int32, box.keys) + jnp.asarray(box.key).astype(jnp.int32)
        own = jnp.take(words, key // WORD, axis=3, mode="clip")
        return ((own >> (key % WORD)[None, None, None]) & 1) != 0


def unpacked(bits: MaskBits) -> Packed:
    """The mask of pairs that bits say."""
    b, n, tiles, width, rows = bits.words.shape
    return Packed(bits.words.swapaxes(-1, -2).reshape(b, n, tiles * rows, width))


def pairs_of(operands: Operands, rows: Any, keys: Any) -> Pairs | None:
    """The mask of pairs of a call on the default path, whose boxes lie within `rows` and `keys`."""
    found = operands.pairs if operands.bits is None else unpacked(operands.bits)
    return None if found is None else found.padded(rows, keys)
