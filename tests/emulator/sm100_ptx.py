"""Pieces of PTX programs for sm_100: %r1 is the thread, %r2 shared memory, %rd1 the data.

`ALLOCATE` leaves the address of 512 columns in %r3 and the warp's own part of it in %r4; then come
barriers at [%r2], [%r2+8] and [%r2+16], and free shared memory from [%r2+1024].
"""

from __future__ import annotations

import numpy as np

from kernels import emulator
from kernels.emulator.machine.trace import Trace
from tests.emulator.programs import ADDRESS, HEAD, TAIL, Launch

ALLOCATE = """
shr.u32 %r5, %r1, 5;
setp.ne.u32 %p1, %r5, 0;
@%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+32], 512;
setp.ne.u32 %p2, %r1, 0;
@%p2 bra ALLOCATED;
mbarrier.init.shared.b64 [%r2], 1;
mbarrier.init.shared.b64 [%r2+8], 128;
mbarrier.init.shared.b64 [%r2+16], 1;
fence.mbarrier_init.release.cluster;
ALLOCATED:
bar.sync 0;
ld.shared.b32 %r3, [%r2+32];
and.b32 %r6, %r1, 96;
shl.b32 %r6, %r6, 16;
add.s32 %r4, %r3, %r6;
"""
FREE = """
bar.sync 0;
@%p1 bra FREED;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512;
FREED:
"""
BEFORE = "tcgen05.fence::before_thread_sync;\n"
AFTER = "tcgen05.fence::after_thread_sync;\n"
WAIT_LD = "tcgen05.wait::ld.sync.aligned;\n"
WAIT_ST = "tcgen05.wait::st.sync.aligned;\n"

_WAITS = iter(range(1 << 30))


def wait(barrier: int = 0, parity: int = 0) -> str:
    """Waits for a phase of the mbarrier at [%r2 + barrier]."""
    label = f"WAIT{next(_WAITS)}"
    return f"""
    {label}:
    mbarrier.try_wait.parity.shared.b64 %p9, [%r2+{barrier}], {parity}, 1000;
    @!%p9 bra {label};
    """


def one(body: str, thread: int = 0) -> str:
    """One thread executes the body."""
    label = f"ONE{next(_WAITS)}"
    return f"setp.ne.u32 %p8, %r1, {thread};\n@%p8 bra {label};\n{body}\n{label}:\n"


def commit(barrier: int = 0) -> str:
    """The thread's operations arrive on the mbarrier at [%r2 + barrier]."""
    name = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
    return f"add.s32 %r9, %r2, {barrier};\n{name} [%r9];\n"


def registers(first: int, count: int) -> str:
    """{%r.., ...}"""
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def run(
    body: str, data: np.ndarray, launch: Launch | None = None, trace: Trace | None = None
) -> None:
    """Runs a body; what it writes is in `data`."""
    launch = launch or Launch(threads=128)
    head = HEAD.format(threads=launch.threads).replace("sm_90a", "sm_100a")
    emulator.launch(
        head.replace("%r<300>", "%r<600>") + body + TAIL,
        "test",
        grid=(launch.grid, 1, 1),
        block=(launch.threads, 1, 1),
        cluster=(launch.cluster, 1, 1),
        dynamic_smem=launch.shared_bytes,
        params=[ADDRESS.to_bytes(8, "little")],
        memory={ADDRESS: data},
        policy=launch.policy,
        seed=launch.seed,
        trace=trace,
    )
