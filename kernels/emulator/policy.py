"""How mean a run is: which warp runs next and when asynchronous operations happen."""

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
      ordered_reductions: all additions to an address, but of integers, must happen in one order;
        for kernels that promise it. Needs `races`.
      tensor_fences: tensor memory asks for tcgen05.fence around barriers, as the PTX ISA does.
      tensor_load_waits: registers of a tcgen05.ld ask for tcgen05.wait::ld, as the PTX ISA does;
        else the first instruction that uses some, but to move them, waits for all of the warp's
        loads, as ptxas sees to.
      clean_exits: when a CTA ends, its barriers expect nothing and hold no arrivals, and a thread
        knows of each commit that arrived on them; else commits may still be to come, their
        arrivals at a CTA that has ended are lost, and stores may still read; loads and products
        must be complete all the same.
      unordered_commits: tcgen05.commits of a thread arrive in any order, of which PTX says nothing;
        else in the order of their issue.
      tensor_lanes: tcgen05.wait concerns each lane's own loads and stores; else it is a barrier of
        the warp, too, so that one lane may tell of all. These five are waived for kernels of
        others alone.
      most_steps: a launch that takes more is stuck in a loop.
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
    most_steps: int = 20_000_000
