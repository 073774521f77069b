"""Memory that kernels address: regions of bytes with bounds and alignment checks."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from kernels.emulator.subnormals import flush

NAN_WORD = 0x7FFF7FFF
"""Uninitialised memory and registers: NaNs as every floating-point type."""


class Fault(Exception):
    """A broken rule, before the engine adds where. `lane` is None where the warp is meant."""

    def __init__(self, rule: str, message: str, lane: int | None = None):
        super().__init__(message)
        self.rule, self.message, self.lane = rule, message, lane


class Region:
    """Consecutive bytes from address `base`; those of a read-only array must not be written.

    All CTAs share a region that is `global_`.
    """

    def __init__(self, name: str, base: int, data: np.ndarray, global_: bool = False):
        self.global_ = global_
        self.name, self.base, self.data, self.end = name, base, data, base + data.size
        self.writable = data.flags.writeable
        self._views = {
            size: data[: data.size // size * size].view(f"u{size}") for size in (1, 2, 4, 8)
        }

    def check(self, addresses: np.ndarray, lanes: np.ndarray, size: int) -> None:
        """Faults unless `size` aligned bytes at every address lie inside."""
        if addresses.min() < self.base or addresses.max() + size > self.end:
            wrong = (addresses < self.base) | (addresses + size > self.end)
            self._fail("out-of-bounds", addresses, lanes, size, wrong)
        if np.bitwise_or.reduce(addresses) & (size - 1):
            self._fail("misaligned", addresses, lanes, size, addresses % size != 0)

    def _fail(
        self, rule: str, addresses: np.ndarray, lanes: np.ndarray, size: int, wrong: np.ndarray
    ) -> None:
        first = int(np.flatnonzero(wrong)[0])
        raise Fault(
            rule,
            f"{size} bytes at {addresses[first]:#x} of {self.name} [{self.base:#x}, {self.end:#x})",
            int(lanes[first]),
        )

    def check_writable(self) -> None:
        """Faults if these bytes were given for reading."""
        if not self.writable:
            raise Fault("read-only", f"{self.name} was given for reading, and is written")

    def _at(self, addresses: np.ndarray, size: int, count: int) -> tuple[Any, np.ndarray]:
        first = (addresses - self.base) // size
        return self._views[size], first[:, None] + np.arange(count)

    def load(self, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        """`count` words of `size` bytes at each address: (addresses, count)."""
        words, index = self._at(addresses, size, count)
        return words[index]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Stores (addresses, count) words; of equal addresses the last one stays."""
        self.check_writable()
        words, index = self._at(addresses, values.dtype.itemsize, values.shape[1])
        words[index] = values

    def add(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Adds (addresses, count) words of any numeric type, one after the other.

        float32 is flushed: subnormal numbers count as zero.
        """
        self.check_writable()
        words, index = self._at(addresses, values.dtype.itemsize, values.shape[1])
        there = words.view(values.dtype)
        if values.dtype != np.float32:
            np.add.at(there, index, values)
            return
        there[index] = flush(there[index])
        np.add.at(there, index, flush(values))
        there[index] = flush(there[index])


class GlobalMemory:
    """Global memory, parameters and constants, at the addresses that the launch gave.

    `version` counts writes, so that a polling warp can sleep until there is news.
    """

    def __init__(self, memory: Mapping[int, Any], own: Iterable[Region]):
        regions = list(own)
        for address, buffer in memory.items():
            view = memoryview(buffer)
            if address % 16:
                raise ValueError(f"memory at {address:#x} is not aligned to 16 bytes")
            if not view.c_contiguous:
                raise ValueError(f"memory at {address:#x} is not contiguous")
            data = np.frombuffer(view, np.uint8)
            regions.append(Region(f"global memory at {address:#x}", address, data, True))
        self._regions = sorted(regions, key=lambda region: region.base)
        self._starts = [region.base for region in self._regions]
        for below, above in zip(self._regions, self._regions[1:], strict=False):
            if below.end > above.base:
                raise ValueError(f"{below.name} overlaps {above.name}")
        self.version = 0

    def split(
        self, addresses: np.ndarray, lanes: np.ndarray, size: int
    ) -> Iterator[tuple[Region, np.ndarray]]:
        """The regions of `size` aligned bytes at every address, and which addresses they hold."""
        left = np.ones(len(addresses), bool)
        region = self.holding(int(addresses[0]))
        if region is not None and region.base <= addresses.min() and addresses.max() < region.end:
            region.check(addresses, lanes, size)
            yield region, left
            return
        while left.any():
            first = int(np.argmax(left))
            region = self.holding(int(addresses[first]))
            if region is None:
                raise Fault(
                    "out-of-bounds",
                    f"{size} bytes at {int(addresses[first]):#x}, which is no memory of the launch",
                    int(lanes[first]),
                )
            held = left & (addresses >= region.base) & (addresses < region.end)
            region.check(addresses[held], lanes[held], size)
            yield region, held
            left &= ~held

    def holding(self, address: int) -> Region | None:
        """The region of an address."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._regions[index].end:
            return None
        return self._regions[index]


def uninitialised(size: int) -> np.ndarray:
    """Bytes that nobody has written."""
    return np.full(-(-size // 4), NAN_WORD, np.uint32).view(np.uint8)[:size]
