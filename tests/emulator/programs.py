"""Small PTX programs for tests: each is a body between the usual head and tail."""

from __future__ import annotations

import dataclasses

import numpy as np

from kernels import emulator
from kernels.emulator import Policy

ADDRESS = 0x10000

HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .u64 test_param_0)
.reqntid {threads}, 1, 1
{{
.reg .pred %p<50>;
.reg .b16 %rs<50>;
.reg .b32 %r<300>;
.reg .b64 %rd<50>;
ld.param.b64 %rd1, [test_param_0];
mov.u32 %r1, %tid.x;
mov.b32 %r2, smem;
"""

TAIL = """
ret;
}
"""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a program runs: %rd1 is the address of `data`, %r1 the thread, %r2 shared memory.

    least_ctas: that a multiprocessor has to have room for.
    """

    threads: int = 32
    least_ctas: int = 1
    shared_bytes: int = 4096
    grid: int = 1
    cluster: int = 1
    policy: Policy = Policy()  # noqa: RUF009 - frozen
    seed: int = 0


def run(
    body: str,
    data: np.ndarray,
    launch: Launch | None = None,
    grid: tuple[int, int, int] | None = None,
    cluster: tuple[int, int, int] | None = None,
) -> emulator.Report:
    """Runs a body; what it writes is in `data`. `grid` and `cluster` may have three sizes."""
    launch = launch or Launch()
    head = HEAD.format(threads=launch.threads)
    head = head.replace("\n{", f"\n.minnctapersm {launch.least_ctas}\n{{", 1)
    return emulator.launch(
        head + body + TAIL,
        "test",
        grid=grid or (launch.grid, 1, 1),
        block=(launch.threads, 1, 1),
        cluster=cluster or (launch.cluster, 1, 1),
        dynamic_smem=launch.shared_bytes,
        params=[ADDRESS.to_bytes(8, "little")],
        memory={ADDRESS: data},
        policy=launch.policy,
        seed=launch.seed,
    )
