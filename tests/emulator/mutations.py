"""Broken copies of a kernel: one wait, arrival, barrier, fence or byte count changed at a time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_REMOVED = (
    r"bar\.sync",
    r"bar\.arrive",
    r"bar\.warp\.sync",
    r"fence\.",
    r"wgmma\.fence",
    r"wgmma\.wait_group",
    r"wgmma\.commit_group",
    r"mbarrier\.init",
    r"barrier\.cluster",
    r"clusterlaunchcontrol\.try_cancel",
    r"st\.async",
    r"mbarrier\.arrive",
    r"cp\.async\.bulk\.commit_group",
    r"cp\.async\.bulk\.wait_group",
    r"red\.release",
    r"tcgen05\.(alloc|dealloc|commit|fence|wait)",
)
"""Instructions whose absence must be noticed."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of one line; the other lines keep their numbers."""

    line: int
    change: str
    text: str


def mutations(ptx: str) -> Iterator[Mutation]:
    """Every mutation of a kernel."""
    lines = ptx.split("\n")
    for number, line in enumerate(lines, 1):
        statements = re.findall(r"[^;]+;?", line)
        for place, statement in enumerate(statements):
            code = statement.strip()
            for change, new in _changes(code):
                broken = "".join([*statements[:place], new, *statements[place + 1 :]])
                text = "\n".join([*lines[: number - 1], broken, *lines[number:]])
                yield Mutation(number, f"{change}: {code}", text)


def _changes(code: str) -> Iterator[tuple[str, str]]:
    if any(re.match(pattern, code) for pattern in _REMOVED):
        yield "removed", ""
    waits = re.match(r"mbarrier\.try_wait\.parity\.shared\.b64 (\w+), (\[[^]]+\]), (\S+),", code)
    if waits:
        yield "never waits", f"setp.eq.b32 {waits[1]}, 0, 0;"
    if re.match(r"wgmma\.wait_group.*\s0;", code):
        yield "waits for all but one", code.replace("0;", "1;")
    if code.startswith("ld.acquire"):
        yield "relaxed", code.replace("acquire", "relaxed")
    if code.startswith("red.release"):
        yield "relaxed", code.replace("release", "relaxed")
    if re.match(r"barrier\.cluster\.arrive(\.aligned)?;", code):
        yield "relaxed", code.replace("arrive", "arrive.relaxed")
    if ".multicast::cluster" in code and code.endswith(";"):
        alone = re.sub(r"\.multicast::cluster(::all)?", "", code)
        yield "to itself alone", re.sub(r", %rs\d+", "", alone)
    barrier = re.match(r"bar\.sync\s+(\S+), (\d+);", code)
    if barrier:
        yield "fewer threads", f"bar.sync {barrier[1]}, {int(barrier[2]) - 32};"
