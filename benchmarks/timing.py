"""The one timing protocol: bursts of back-to-back calls, contenders in turns, medians.

A burst is long against the dispatch of its first call and the wait for its last, and the device
works without gaps in between. Contenders alternate burst by burst, in a new random order each
time, so that clocks and temperature treat them alike. What ran just before seems to matter: in an
order that only rotates, where a contender nearly always follows the same other one, two copies of
one kernel differed by up to 5 % (one H200, 2026-11-24); in random orders by 1 %. Each case has new
orders, too, so that such effects average out over the cases. (Until 2026-11-29 all cases of as many
contenders had the same ones.)
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

Call = Callable[[], Any]

ORDERS = random.Random(0)
"""Draws the orders of contenders, from case to case of a process."""

_ESTIMATES = 3


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How long to time.

    Attributes:
      loops: number of bursts of each contender.
      burst_s: how long a burst shall last, in seconds.
      max_calls: most calls in a burst, however short they are.
    """

    loops: int = 5
    burst_s: float = 0.06
    max_calls: int = 400

    def calls(self, seconds: float) -> int:
        """Returns the calls of a burst, of which one takes so many seconds."""
        return max(1, min(math.ceil(self.burst_s / seconds), self.max_calls))


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call in each burst, and the number of calls in a burst."""

    seconds: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        """Returns the seconds of one call."""
        return statistics.median(self.seconds)


def burst(call: Call, calls: int) -> float:
    """Returns the seconds of one of back-to-back calls; earlier work is over when they start."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def estimate(call: Call) -> float:
    """Returns about how many seconds a call takes.

    A contender's first calls may wait for memory that nobody has asked for yet. By them alone its
    bursts would have so few calls that what starting a burst takes would count.
    """
    burst(call, 1)
    return min(burst(call, 2) for _ in range(_ESTIMATES))


def interleave(calls: dict[str, Call], protocol: Protocol) -> dict[str, Timing | Exception]:
    """Times every call; one that raises is reported and does not affect the others."""
    outcomes: dict[str, Timing | Exception] = {}
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        try:
            repeats[name] = protocol.calls(estimate(call))
        except Exception as error:
            outcomes[name] = error
    seconds: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(protocol.loops):
        alive = [name for name in repeats if name not in outcomes]
        for name in ORDERS.sample(alive, len(alive)):
            try:
                seconds[name].append(burst(calls[name], repeats[name]))
            except Exception as error:
                outcomes[name] = error
    timings = {
        name: Timing(tuple(seconds[name]), repeats[name])
        for name in repeats
        if name not in outcomes
    }
    return outcomes | timings
