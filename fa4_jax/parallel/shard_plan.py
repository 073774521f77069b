"""Which shards meet, and how keys travel to the rows that see them: arithmetic without arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

from fa4_jax.bands import CAUSAL, EVERYTHING, Band, Window, may_meet
from fa4_jax.parallel.layout import Layout

Pairs = tuple[tuple[int, int], ...]
"""(source device, destination device), each at most once on either side."""


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Two sequences (rows and keys) that are sharded alike, and which rows see which keys.

    Attributes:
      devices: number of shards.
      layout: how shards are made of chunks.
      rows, keys: of one shard.
      window: as `Problem`.
      offset: position of row 0 of the whole among the keys, or None if it is an array.
    """

    devices: int
    layout: Layout
    rows: int
    keys: int
    window: Window
    offset: int | None

    @property
    def chunks(self) -> int:
        """Chunks of a shard."""
        return 2 if self.layout == "zigzag" else 1

    @property
    def rows_of_chunk(self) -> int:
        """Rows of one chunk."""
        return self.rows // self.chunks

    @property
    def keys_of_chunk(self) -> int:
        """Keys of one chunk."""
        return self.keys // self.chunks

    @property
    def band(self) -> bool:
        """Whether causality or a window limits the keys of a row."""
        return self.window != EVERYTHING

    @property
    def kind(self) -> Literal["whole", "causal", "general"]:
        """How a pair of shards is computed.

        whole: one call. causal: zig-zag, rows and keys at the same positions; one dense call
        except for the own shard. general: chunk by chunk, two calls of two chunks each.
        """
        if self.layout == "contiguous" or not self.band:
            return "whole"
        aligned = self.offset == 0 and self.rows == self.keys
        return "causal" if aligned and self.window == CAUSAL else "general"

    def chunk(self, device: Any, half: int) -> Any:
        """Index, in the natural order, of a device's first or second chunk (ints or arrays)."""
        return device if half == 0 else 2 * self.devices - 1 - device

    def chunks_meet(self, row_chunk: int, key_chunk: int) -> bool:
        """Whether a row of one chunk may see a key of another."""
        if self.offset is None:
            return True
        t, s = self.devices * self.rows, self.devices * self.keys
        first_row, first_key = row_chunk * self.rows_of_chunk, key_chunk * self.keys_of_chunk
        return may_meet(
            Band(t, s, self.offset, *self.window),
            range(first_row, first_row + self.rows_of_chunk),
            range(first_key, first_key + self.keys_of_chunk),
        )

    def halves_meet(self, device: int, owner: int, row_half: int, key_half: int) -> bool:
        """Whether a chunk of a device's rows may see a chunk of an owner's keys."""
        return self.chunks_meet(self.chunk(device, row_half), self.chunk(owner, key_half))

    def meet(self, device: int, owner: int) -> bool:
        """Whether a device's rows may see any of an owner's keys."""
        halves = range(self.chunks)
        return any(self.halves_meet(device, owner, r, k) for r in halves for k in halves)


@dataclasses.dataclass(frozen=True)
class Visit:
    """One step of the ring: every device works on the keys of the device `shift` before it.

    Attributes:
      shift: modulo the number of devices; 0 is the own shard.
      hop: transfers that bring those keys, from their home or from the visit before.
      from_home: the hop starts a new direction, from every device's own keys.
      home: transfers that bring their gradients back.
    """

    shift: int
    hop: Pairs = ()
    from_home: bool = False
    home: Pairs = ()


@functools.lru_cache(maxsize=256)
def visits(shards: ShardPlan) -> tuple[Visit, ...]:
    """The steps of the ring, the own shard first: up the ring, then down, as far as rows see.

    Of the ways to share out the steps between the two directions the one with the fewest
    transfers is taken. A shard travels no further than the last device that needs it, and back
    home in one transfer.
    """
    n = shards.devices
    needed = {shift: [d for d in range(n) if shards.meet(d, (d - shift) % n)] for shift in range(n)}
    plans = []
    for up in range(n):
        last = max((s for s in range(1, up + 1) if needed[s]), default=0)
        low = min((s for s in range(up + 1, n) if needed[s]), default=n)
        if last == up:
            down = n - low
            plans.append(_direction(needed, n, up, 1) + _direction(needed, n, down, -1))
    best = min(plans, key=lambda plan: sum(len(visit.hop) for visit in plan))
    return (Visit(0), *best)


def _direction(needed: dict[int, list[int]], n: int, steps: int, sign: int) -> tuple[Visit, ...]:
    """The visits of one direction, nearest first."""
    furthest = [0] * n  # steps that each device's shard has to travel
    for step in range(1, steps + 1):
        for device in needed[sign * step % n]:
            furthest[(device - sign * step) % n] = step
    result = []
    for step in range(1, steps + 1):
        owners = [owner for owner in range(n) if furthest[owner] >= step]
        hop = tuple(sorted(((o + sign * (step - 1)) % n, (o + sign * step) % n) for o in owners))
        home = tuple((device, (device - sign * step) % n) for device in needed[sign * step % n])
        result.append(Visit(sign * step % n, hop, step == 1, home))
    return tuple(result)
