"""The scheduling adversary: which warp runs next, and when asynchronous operations happen."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Policy:
    """The choices that hardware leaves open.

    Attributes:
      schedule: "in_order" runs the first warp that can; "random" any; "starve" any but one, which
        is picked anew for every CTA and runs only when no other can.
      asynchronous: when TMA, bulk copies, products and reductions take place: "late" is when
        something needs them or nothing else can run, "early" is at once, "random" either.
      resident_ctas: CTAs that run at a time.
      start_order: of clusters: by their index, the last first, or any.
      races: check that accesses to shared memory are ordered and fenced.
      global_races: check that accesses to global memory are ordered and fenced, too. Needs `races`;
        takes time and memory, for every buffer that the kernel touches.
      ordered_reductions: all reductions of an address, except those of integers, must happen in
        one order; it is for kernels that promise this. Needs `races`.
      tensor_fences: accesses to tensor memory need tcgen05.fence around barriers, as the PTX ISA
        says.
      tensor_load_waits: registers of a tcgen05.ld need tcgen05.wait::ld, as the PTX ISA says;
        otherwise the first instruction that uses some, except to move them, waits for all of the
        warp's loads, as in what ptxas makes.
      clean_exits: when a CTA ends, its barriers expect nothing and hold no arrivals, and a thread
        knows of each commit that arrived on them; otherwise commits may still arrive later, their
        arrivals at a CTA that has ended are lost, and stores may still read. Loads and products
        must be complete in either case.
      unordered_commits: tcgen05.commits of a thread arrive in any order, since PTX gives none;
        otherwise they arrive in the order of their issue.
      tensor_lanes: tcgen05.wait concerns each lane's own loads and stores; otherwise it is a
        barrier of the warp, too, so that one lane may release what all did.
      one_place: warps that wait in one phase of a named barrier do so by one instruction, as
        compute-sanitizer's synccheck asks; PTX does not. Only kernels of others need one of these
        six to be False.
      most_steps: a launch that takes more steps counts as stuck in a loop.
    """

    schedule: Literal["in_order", "random", "starve"] = "random"
    asynchronous: Literal["late", "early", "random"] = "late"
    resident_ctas: int = 4
    start_order: Literal["index", "reversed", "random"] = "index"
    races: bool = True
    global_races: bool = False
    ordered_reductions: bool = False
    tensor_fences: bool = True
    tensor_load_waits: bool = True
    clean_exits: bool = True
    unordered_commits: bool = True
    tensor_lanes: bool = True
    one_place: bool = True
    most_steps: int = 20_000_000
