"""clusterlaunchcontrol, and what a program asks of its surroundings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from tests.emulator import programs
from tests.emulator.test_memory import policies

PERSISTENT = """
.reg .b128 %q;
mov.u32 %r3, %cluster_ctarank;
mov.u32 %r40, %ctaid.x; mov.u32 %r41, %ctaid.y; mov.u32 %r42, %ctaid.z;
sub.s32 %r40, %r40, %r3;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra INITIALISED;
mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
INITIALISED:
barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
mov.b32 %r10, 0;
add.s32 %r20, %r2, 64;
or.b32 %r21, %r1, %r3;
setp.ne.u32 %p3, %r21, 0;
TILE:
@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
@!%p3 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{cast}.b128
  [%r20], [%r2];
add.s32 %r43, %r40, %r3;
mad.lo.s32 %r5, %r42, 4, %r41; mad.lo.s32 %r5, %r5, 6, %r43;
mul.wide.u32 %rd2, %r5, 4; add.s64 %rd3, %rd1, %rd2;
@!%p1 red.global.add.u32 [%rd3], 1;
WAITING:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r10;
@!%p2 bra WAITING;
xor.b32 %r10, %r10, 1;
ld.shared.b128 %q, [%r20];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p4, %q;
{first}
@%p4 bra TILE;
"""
VECTOR = "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r40, %r41, %r42, _}, %q;"
SINGLE = "".join(
    f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}.b32.b128 %r{40 + i}, %q;"
    for i, axis in enumerate("xyz")
)
AGAIN = """
@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
@!%p3 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{cast}.b128
  [%r20], [%r2];
LAST:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r10;
@!%p2 bra LAST;
"""


@policies()
@pytest.mark.parametrize(("ctas", "first"), [(1, VECTOR), (2, SINGLE)])
def test_every_tile_once(ctas: int, first: str, policy: Policy, seed: int) -> None:
    """Clusters that take the next tile until there is none; each CTA marks its own."""
    cast = ".multicast::cluster::all" if ctas > 1 else ""
    body = PERSISTENT.format(cast=cast, first=first)
    data = np.zeros(72, np.uint32)
    launch = programs.Launch(threads=64, policy=policy, seed=seed)
    report = programs.run(body, data, launch, grid=(6, 4, 3), cluster=(ctas, 1, 1))
    assert (data == 1).all()
    starts = sum(counter["mbarrier.init.shared::cta.b64"] for counter in report.instructions)
    assert 1 <= starts < 72
    if policy.schedule == "in_order":
        assert starts == policy.resident_ctas // ctas * ctas
    with pytest.raises(EmulationError, match=r"launch-control.*did not succeed"):
        programs.run(body + AGAIN.format(cast=cast), data, launch, (6, 4, 3), (ctas, 1, 1))
    with pytest.raises(EmulationError, match=r"race|no response"):
        early = body.replace("WAITING:\n", "bra.uni READ; WAITING:\n").replace("xor", "READ: xor")
        programs.run(early, data, launch, (6, 4, 3), (ctas, 1, 1))


def test_response_of_something_else(seed: int) -> None:
    body = ".reg .b128 %q; mov.b64 %rd5, -1; mov.b128 %q, {%rd5, %rd5};"
    body += "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p4, %q;"
    with pytest.raises(EmulationError, match="launch-control"):
        programs.run(body, np.zeros(4, np.uint32), programs.Launch(seed=seed))


CLOCKS = """
mov.u32 %r5, %clock; mov.u64 %rd5, %clock64; mov.u64 %rd6, %globaltimer; mov.u32 %r6, %clock;
nanosleep.u32 20;
griddepcontrol.wait;
mov.u64 %rd7, %clock64;
griddepcontrol.launch_dependents;
sub.s64 %rd8, %rd7, %rd5; cvt.u32.u64 %r7, %rd8;
sub.s32 %r8, %r6, %r5;
mov.u32 %r9, %lanemask_lt; mov.u32 %r10, %lanemask_ge; mov.u32 %r11, %warpid;
mov.u32 %r12, %smid; mov.u32 %r13, %nsmid; mov.u32 %r14, %dynamic_smem_size;
mul.wide.u32 %rd2, %r1, 32; add.s64 %rd3, %rd1, %rd2;
st.global.v4.b32 [%rd3], {%r7, %r8, %r9, %r10};
st.global.v4.b32 [%rd3+16], {%r11, %r12, %r13, %r14};
"""


def test_surroundings(seed: int) -> None:
    data = np.zeros((64, 8), np.uint32)
    report = programs.run(CLOCKS, data, programs.Launch(threads=64, seed=seed))
    for thread, row in enumerate(data.tolist()):
        lane = thread % 32
        assert row[0] > 0 and row[1] > 0
        assert row[2] == (1 << lane) - 1 and row[3] == (1 << 32) - (1 << lane)
        assert row[4] == thread // 32 and row[5] < row[6] and row[7] == 4096
    counts = report.instructions[0]
    assert counts["griddepcontrol.wait"] == counts["griddepcontrol.launch_dependents"] == 1
    other = np.zeros_like(data)
    programs.run(CLOCKS, other, programs.Launch(threads=64, seed=seed + 1))
    assert (other[:, 0] != data[:, 0]).any()
    again = np.zeros_like(data)
    programs.run(CLOCKS, again, dataclasses.replace(programs.Launch(threads=64), seed=seed))
    np.testing.assert_array_equal(again, data)
