"""Measures barriers: named ones among a CTA's warps, and mbarriers."""

from __future__ import annotations

from benchmarks.micro.program import (
    Launch,
    Measurement,
    Program,
    each,
    elected,
    init_barriers,
    latency,
    wait,
)

THREADS = (64, 128, 256, 384)
_COPIES = 16
_REPEATS = 64
_SHARED_BYTES = 1024


def _named_barrier(threads: int) -> Program:
    return Program(
        body=each(lambda _: f"bar.sync 1, {threads};"),
        copies=_COPIES,
        counts={"bar.sync": 1},
    )


def _handover() -> Program:
    """Two warps pass a token: wait for one's own mbarrier, arrive at the other's.

    A copy is a wait and an arrival of each warp, a round trip.
    """

    def copy(k: int, copies: int) -> str:
        arrive = elected("mbarrier.arrive.shared.b64 %state, [%theirs];")
        return f"{wait('%own', k % 2, f'WAIT_{copies}_{k}')}\n{arrive}"

    return Program(
        body=lambda copies: "\n".join(copy(k, copies) for k in range(copies)),
        copies=_COPIES,
        counts={"mbarrier.arrive.shared.b64": 1},
        registers=".reg .b32 %own, %theirs;\n.reg .b64 %state;",
        setup=f"""\
mad.lo.s32 %own, %warp, 8, %shared;
xor.b32 %theirs, %own, 8;
{init_barriers(2)}
@%leader mbarrier.arrive.shared.b64 %state, [%own];
bar.sync 0;""",
    )


def _wait_for_what_is_over() -> Program:
    """Waits many times, each time with success at once: the phase before the first is complete."""

    def body(copies: int) -> str:
        return "\n".join(wait("%shared", 1, f"WAIT_{copies}_{k}") for k in range(copies))

    return Program(
        body=body,
        copies=_COPIES,
        counts={"mbarrier.try_wait.parity.shared.b64": 1},
        setup=init_barriers(1),
    )


def _arrivals() -> Program:
    """Arrives by one lane, and completes a phase each time."""
    mnemonic = "mbarrier.arrive.shared.b64"
    return Program(
        body=each(lambda _: elected(f"{mnemonic} %state, [%shared];")),
        copies=_COPIES,
        counts={mnemonic: 1},
        registers=".reg .b64 %state;",
        setup=init_barriers(1),
    )


def measurements() -> list[Measurement]:
    """Measures cycles of a barrier, of a handover between warps, of a wait that need not wait."""

    def launch(threads: int) -> Launch:
        return Launch(threads=threads, repeats=_REPEATS, shared_bytes=_SHARED_BYTES)

    found = [
        latency(f"bar.sync/{threads} threads", _named_barrier(threads), launch(threads))
        for threads in THREADS
    ]
    return [
        *found,
        latency("mbarrier/arrive to wait", _handover(), launch(64), events=2),
        latency("mbarrier/try_wait that succeeds", _wait_for_what_is_over(), launch(32)),
        latency("mbarrier/arrive", _arrivals(), launch(32)),
    ]
