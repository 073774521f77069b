"""Computes from a profile how much of the transfers' time kernels hide.

On each GPU, transfers are the time in which a collective's kernel or a copy from another GPU runs,
and they are hidden while any other kernel runs too. What is left is exposed: the GPU waits.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

Interval = tuple[float, float]

TRANSFER = re.compile(r"nccl|memcpyp2p|memcpy.*peer|collective|all-?gather|all-?to-?all", re.I)
"""The names of events that are transfers: NCCL's kernels, and copies between GPUs."""

NO_WORK = re.compile(r"memcpy(h2d|d2h|d2d)|memset", re.I)
"""The names of events that are neither transfers nor kernels."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same time as disjoint intervals in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Returns the time in both; each is disjoint and in order."""
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            result.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def gpu_events(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns streams' complete events by their GPU's name, from a trace in Chrome's format."""
    events = trace["traceEvents"]
    processes = {
        e["pid"]: e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e.get("name") == "process_name"
    }
    threads = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e.get("name") == "thread_name"
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for e in events:
        process = str(processes.get(e.get("pid"), ""))
        thread = str(threads.get((e.get("pid"), e.get("tid")), ""))
        if e.get("ph") == "X" and "/device:GPU" in process and "Stream" in thread:
            found.setdefault(process, []).append(e)
    return found


def overlap(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one GPU's times in microseconds: span, kernels, transfers, and what of these is
    hidden.
    """

    def times(keep: Callable[[str], bool]) -> list[Interval]:
        return union((e["ts"], e["ts"] + e.get("dur", 0)) for e in events if keep(e["name"]))

    transfers = times(lambda name: bool(TRANSFER.search(name)))
    kernels = times(lambda name: not TRANSFER.search(name) and not NO_WORK.search(name))
    hidden = length(common(transfers, kernels))
    everything = times(lambda _: True)
    return {
        "span_us": everything[-1][1] - everything[0][0] if everything else 0.0,
        "kernels_us": length(kernels),
        "transfers_us": length(transfers),
        "hidden_us": hidden,
        "exposed_us": length(transfers) - hidden,
    }


def totals(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns number and microseconds of the events by name, the longest first."""
    found: dict[str, list[float]] = {}
    for e in events:
        found.setdefault(e["name"][:120], []).append(e.get("dur", 0))
    order = sorted(found, key=lambda name: -sum(found[name]))
    return {name: {"count": len(found[name]), "us": sum(found[name])} for name in order[:25]}


def timeline(events: list[dict[str, Any]]) -> list[list[Any]]:
    """Returns [start, duration, is a transfer, name] in microseconds from the first, for a plot."""
    first = min(e["ts"] for e in events)
    return [
        [
            round(e["ts"] - first, 1),
            round(e.get("dur", 0), 1),
            bool(TRANSFER.search(e["name"])),
            e["name"][:40],
        ]
        for e in sorted(events, key=lambda e: e["ts"])
        if e.get("dur", 0) >= 1
    ]


def summarise(trace: dict[str, Any]) -> dict[str, Any]:
    """Returns, over all GPUs, the share of transfers that is hidden, and what ran.

    Raises:
      ValueError: no GPU was traced.
    """
    gpus = gpu_events(trace)
    if not gpus:
        raise ValueError("the trace has no events of GPU streams")
    each = {name: overlap(events) for name, events in sorted(gpus.items())}
    transfers = sum(x["transfers_us"] for x in each.values())
    first = min(gpus)
    return {
        "hidden_share": sum(x["hidden_us"] for x in each.values()) / transfers
        if transfers
        else None,
        "transfers_us_per_gpu": transfers / len(each),
        "exposed_us_per_gpu": sum(x["exposed_us"] for x in each.values()) / len(each),
        "span_us": max(x["span_us"] for x in each.values()),
        "gpus": each,
        "events": totals(gpus[first]),
        "timeline": timeline(gpus[first]),
    }


def traced(call: Callable[[], Any], folder: Path, devices: int) -> dict[str, Any]:
    """Runs one call under the profiler; the trace stays in the folder.

    Raises:
      ValueError: the trace shows fewer GPUs than there are.
    """
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        jax.block_until_ready(call())
    paths = sorted(folder.rglob("*perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise ValueError(f"the profiler left no trace in {folder}")
    with gzip.open(paths[-1]) as file:
        found = summarise(json.load(file))
    if len(found["gpus"]) < devices:
        raise ValueError(f"the trace shows {len(found['gpus'])} of {devices} GPUs")
    return found
