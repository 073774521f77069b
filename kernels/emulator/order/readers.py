"""The reads of a CTA's shared memory that a later write must be ordered after.

Shared memory is divided into entries of two bytes. For every warp, a plane holds the moment of its
last read of each entry, and a mask of the lanes that read it then. An older read by other lanes is
forgotten only if the new reader knows of it, since a write that is ordered after the new read is
then ordered after the old one, too. Otherwise the older read goes into a list.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kernels.emulator.ptx.program import LANES

_BITS = np.uint32(1) << np.arange(LANES, dtype=np.uint32)


@dataclasses.dataclass(frozen=True)
class _Plane:
    """Reads by one warp; `older` are (moment, mask) pairs by entry."""

    moment: np.ndarray
    mask: np.ndarray
    older: dict[int, list[tuple[int, int]]]


class Readers:
    """Reads of one CTA's shared memory, whose entries are numbered."""

    def __init__(self, entries: int):
        self._entries = entries
        self._planes: dict[int, _Plane] = {}
        self._latest: dict[int, int] = {}

    def record(
        self, clock: np.ndarray, threads: np.ndarray, entries: np.ndarray, moment: int
    ) -> None:
        """Threads of one warp read entries, (threads, some), at a moment."""
        warp = int(threads[0]) // LANES
        if warp not in self._planes:
            moments, masks = np.zeros(self._entries, np.int32), np.zeros(self._entries, np.uint32)
            self._planes[warp] = _Plane(moments, masks, {})
        self._latest[warp] = moment
        plane, bits = self._planes[warp], _BITS[threads % LANES][:, None]
        before = plane.moment[entries]
        stale = before != moment
        if stale.any():
            masks = plane.mask[entries]
            lost = stale & (before > 0) & ((masks & ~bits) != 0)
            if lost.any():
                lanes = slice(warp * LANES, (warp + 1) * LANES)
                lost &= clock[threads, lanes].min(1)[:, None] < before
                for entry, old, mask in zip(entries[lost], before[lost], masks[lost], strict=True):
                    pairs = plane.older.setdefault(int(entry), [])
                    if (int(old), int(mask)) not in pairs:
                        pairs.append((int(old), int(mask)))
            plane.mask[entries[stale]] = 0
            plane.moment[entries] = moment
        plane.mask[entries] |= bits
        if ((plane.mask[entries] & bits) == 0).any():
            np.bitwise_or.at(plane.mask, entries, np.broadcast_to(bits, entries.shape))

    def unknown(self, known: np.ndarray, entries: np.ndarray) -> tuple[int, int] | None:
        """An entry and a thread that reads it, unknown to a row of `known`; None if all are known.

        Args:
          known: clocks, (rows, agents).
          entries: (rows, some).
        """
        if not self._planes:
            return None
        warps = max(self._planes) + 1
        least = known[:, : warps * LANES].reshape(len(known), warps, LANES).min((0, 2))
        for warp, plane in self._planes.items():
            if least[warp] >= self._latest[warp]:
                continue
            seen = known[:, warp * LANES : (warp + 1) * LANES]
            late = plane.moment[entries] > seen.min(1)[:, None]
            if late.any():
                found = _exactly(plane, seen, entries, late)
                if found is not None:
                    return found[0], warp * LANES + found[1]
            if not plane.older:
                continue
            for row, entry in np.argwhere(np.isin(entries, list(plane.older))).tolist():
                at = int(entries[row, entry])
                for moment, mask in plane.older[at]:
                    lanes = (mask & _BITS) != 0
                    if (seen[row, lanes] < moment).any():
                        lane = int(np.argmax(lanes & (seen[row] < moment)))
                        return at, warp * LANES + lane
        return None


def _exactly(
    plane: _Plane, seen: np.ndarray, entries: np.ndarray, late: np.ndarray
) -> tuple[int, int] | None:
    """An entry and a lane whose read of it is later than what is known of that lane."""
    rows, at = np.nonzero(late)[0], entries[late]
    read = (plane.mask[at][:, None] & _BITS) != 0
    wrong = read & (seen[rows] < plane.moment[at][:, None])
    if not wrong.any():
        return None
    first, lane = np.argwhere(wrong)[0]
    return int(at[first]), int(lane)
