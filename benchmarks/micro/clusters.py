"""Measures pairs of CTAs: a token through their mbarriers, copies into each other's memory."""

from __future__ import annotations

from benchmarks.micro.program import (
    ALONE_BYTES,
    PER_SM,
    Launch,
    Measurement,
    Program,
    elected,
    init_barriers,
    latency,
    rate,
    wait,
)

SIZES = (4096, 16384)
_STAGES = 4
_COPIES = 4
_REPEATS = 64
_TILES = 1024  # where tiles start in shared memory, after the barriers
_REGISTERS = """\
.reg .b32 %rank, %peer, %theirs, %target;
.reg .b64 %state;"""
_TOGETHER = "barrier.cluster.arrive;\nbarrier.cluster.wait;"
_PEER = """\
mov.u32 %rank, %cluster_ctarank;
xor.b32 %peer, %rank, 1;
mapa.shared::cluster.u32 %theirs, %shared, %peer;"""


def _handover(release: str) -> Program:
    """Two CTAs pass a token: wait for one's own mbarrier, arrive at the other's.

    A copy is a wait and an arrival of each, a round trip. Before an arrival that releases to the
    cluster ptxas puts a memory barrier.
    """
    mnemonic = f"mbarrier.arrive{release}.shared::cluster.b64"
    arrive = elected(f"{mnemonic} _, [%theirs];")

    def body(copies: int) -> str:
        return "\n".join(
            f"{wait('%shared', k % 2, f'WAIT_{copies}_{k}')}\n{arrive}" for k in range(copies)
        )

    return Program(
        body=body,
        copies=_COPIES,
        counts={mnemonic: 1},
        registers=_REGISTERS,
        setup=f"""\
{init_barriers(1)}
{_PEER}
{_TOGETHER}
setp.eq.and.b32 %looping, %rank, 0, %leader;
@%looping mbarrier.arrive.shared.b64 %state, [%shared];""",
        finish=_TOGETHER,
        cluster=2,
    )


def _stream(size: int) -> Program:
    """Each CTA sends to the other as soon as that one's data are in the stage. A copy is a round.

    Nothing says that the other is done with the stage: what is there does not matter.
    """
    mnemonic = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"

    def send(stage: int) -> str:
        tile = _TILES + stage * size
        own, theirs = f"[%shared+{8 * stage}]", f"[%theirs+{8 * stage}]"
        return elected(
            f"mbarrier.arrive.expect_tx.shared.b64 %state, {own}, {size};",
            f"{mnemonic} [%theirs+{tile}], [%target+{tile}], {size}, {theirs};",
        )

    def wait_for(stage: int, parity: int, label: str) -> str:
        return wait(f"%shared+{8 * stage}", parity, f"WAIT_{label}_{stage}")

    def body(copies: int) -> str:
        return "\n".join(
            f"{wait_for(stage, k % 2, f'{copies}_{k}')}\n{send(stage)}"
            for k in range(copies)
            for stage in range(_STAGES)
        )

    first = "\n".join(send(stage) for stage in range(_STAGES))
    return Program(
        body=body,
        copies=_COPIES,
        counts={mnemonic: _STAGES},
        registers=_REGISTERS,
        # The content does not matter; the source lies after the region that the other CTA writes.
        setup=f"{init_barriers(_STAGES)}\n{_PEER}\n{_TOGETHER}\n"
        f"add.s32 %target, %shared, {_STAGES * size};\n{first}",
        finish="\n".join([*(wait_for(stage, 0, "END") for stage in range(_STAGES)), _TOGETHER]),
        cluster=2,
    )


def measurements() -> list[Measurement]:
    """Measures cycles of a handover from SM to SM, and bytes that each sends, one pair or all at a
    time.
    """
    found = [
        latency(
            name,
            _handover(release),
            Launch(threads=32, repeats=_REPEATS, ctas=2, shared_bytes=ALONE_BYTES),
            events=2,
        )
        for name, release in (
            ("cluster/arrive to wait", ".release.cluster"),
            ("cluster/arrive of the CTA's scope to wait", ""),
        )
    ]
    for size in SIZES:
        for name, ctas in (("2 SMs", 2), ("all SMs", PER_SM)):
            launch = Launch(
                threads=32,
                repeats=_REPEATS,
                ctas=ctas,
                shared_bytes=max(ALONE_BYTES, _TILES + 2 * _STAGES * size),
            )
            name = f"cluster/{size // 1024} KB x {_STAGES} to the other/bandwidth/{name}"
            found.append(rate(name, "bytes", _stream(size), launch, size))
    return found
