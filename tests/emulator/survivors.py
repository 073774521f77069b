"""What no trial notices of the kernels' mutations, by kernel and kind.

docs/notes/mutations.md proves each of these redundant, or says what is blind.
"""

from __future__ import annotations

from collections import Counter

_REGISTERS = "removed: setmaxnreg.inc.sync.aligned.u32"
_TRY_WAIT = "mbarrier.try_wait.parity.shared.b64"
_WAIT = f"never waits: {_TRY_WAIT}"
_WGMMA = "wgmma.mma_async.sync.aligned"
_LATE_PROXY_FENCE = "moved down over bar.sync: fence.proxy.async.shared::cta"
_LATE_INITIALISATION = "moved down over bar.sync: fence.mbarrier_init.release.cluster"
_PRODUCT_FENCE = "removed: wgmma.fence.sync.aligned"
_PRODUCT_GROUP = "removed: wgmma.commit_group.sync.aligned"
_MEETING = "removed: bar.warp.sync"
_STORED = "waits for reads: cp.async.bulk.wait_group"
_MASKED_FACTOR = Counter(
    {f"{change}: bar.arrive": 1 for change in ("removed", "more threads", "fewer threads")}
)
_OF_PAIR = Counter({_REGISTERS: 1, "relaxed: barrier.cluster.arrive": 1})

SURVIVORS: dict[str, Counter[str]] = {
    "sm_100f_fwd_bf16_d128": _MASKED_FACTOR + Counter({_REGISTERS: 1, _MEETING: 2}),
    "sm_100f_fwd_bf16_d128_band": Counter({_REGISTERS: 1, _MEETING: 2}),
    "sm_100f_fwd_bf16_d256": _MASKED_FACTOR + _OF_PAIR + Counter({_MEETING: 4}),
    "sm_100f_fwd_bf16_d256_band": _OF_PAIR + Counter({_MEETING: 4}),
    "sm_100f_bwd_bf16_d64": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d64_deterministic": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d128": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d128_band_deterministic": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d192x128": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d192x128_deterministic": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d256": _OF_PAIR,
    "sm_100f_bwd_bf16_d256_deterministic": Counter({_REGISTERS: 1}),
    "sm_100f_bwd_post_bf16_d128": Counter(),
    "sm_100f_bwd_post_bf16_d192x128": Counter(),
    "sm_100f_bwd_post_bf16_d256": Counter(),
    "sm_90a_fwd_bf16_d64": Counter({_REGISTERS: 1, _PRODUCT_FENCE: 1, _STORED: 1}),
    "sm_90a_fwd_bf16_d128_band": Counter({_REGISTERS: 1, _PRODUCT_FENCE: 3, _STORED: 1}),
    "sm_90a_bwd_bf16_d64_deterministic": Counter(
        {_REGISTERS: 1, _WAIT: 1, _PRODUCT_FENCE: 3, _PRODUCT_GROUP: 1, _STORED: 1}
    ),
    "sm_90a_bwd_bf16_d128": Counter(
        {_REGISTERS: 1, _WAIT: 1, _PRODUCT_FENCE: 3, _PRODUCT_GROUP: 1, _STORED: 1}
    ),
    "sm_90a_bwd_post_bf16_d64": Counter({_STORED: 1}),
}
"""Kernels, and what is not noticed when one of their instructions is dropped, weakened or counts
otherwise: docs/notes/mutations.md proves each of these redundant. The preprocessing kernels
synchronise nothing."""

_MOVED_IN_FORWARD = Counter(
    {
        _LATE_PROXY_FENCE: 2,
        _LATE_INITIALISATION: 1,
        "moved down over arithmetic: wgmma.wait_group.sync.aligned": 1,
        f"moved down over {_TRY_WAIT}: bar.arrive": 1,
        f"moved down over {_TRY_WAIT}: mbarrier.arrive.shared.b64": 1,
    }
)


def _moved_in_step(shape: str, loops: int) -> Counter[str]:
    """Of a step of Hopper's forward, whose text comes once in every loop."""
    kinds = (
        f"moved down over bar.sync: {_TRY_WAIT}",
        f"moved down over {_WGMMA}.{shape}.f32.bf16.bf16: wgmma.fence.sync.aligned",
        "moved down over mbarrier.arrive.shared.b64: wgmma.wait_group.sync.aligned",
    )
    return Counter(dict.fromkeys(kinds, loops))


_MOVED_IN_BACKWARD = Counter(
    {
        _LATE_PROXY_FENCE: 4,
        _LATE_INITIALISATION: 1,
        "moved down over wgmma.fence.sync.aligned: wgmma.wait_group.sync.aligned": 1,
        "moved down over mbarrier.arrive.shared.b64: wgmma.wait_group.sync.aligned": 1,
        f"moved down over mbarrier.arrive.expect_tx.shared.b64: {_TRY_WAIT}": 1,
    }
)
_MOVED_IN_POST = Counter(
    {
        _LATE_PROXY_FENCE: 1,
        "moved down over griddepcontrol.launch_dependents: griddepcontrol.wait": 1,
    }
)
MOVED_SURVIVORS: dict[str, Counter[str]] = {
    "sm_90a_fwd_bf16_d64": _MOVED_IN_FORWARD + _moved_in_step("m64n64k16", 1),
    "sm_90a_fwd_bf16_d128_band": _MOVED_IN_FORWARD + _moved_in_step("m64n128k16", 3),
    "sm_90a_bwd_bf16_d128": _MOVED_IN_BACKWARD
    + Counter(
        {
            "moved down over ld.global.v4.b32: bar.sync": 1,
            f"moved down over {_WGMMA}.m64n64k16.f32.bf16.bf16: wgmma.fence.sync.aligned": 2,
            f"moved down over {_WGMMA}.m64n128k16.f32.bf16.bf16: wgmma.fence.sync.aligned": 1,
            f"moved up over {_WGMMA}.m64n128k16.f32.bf16.bf16: wgmma.commit_group.sync.aligned": 1,
        }
    ),
    "sm_90a_bwd_bf16_d64_deterministic": _MOVED_IN_BACKWARD
    + Counter(
        {
            f"moved down over {_TRY_WAIT}: mbarrier.arrive.shared.b64": 1,
            f"moved down over {_WGMMA}.m64n64k16.f32.bf16.bf16: wgmma.fence.sync.aligned": 2,
            f"moved down over {_WGMMA}.m64n32k16.f32.bf16.bf16: wgmma.fence.sync.aligned": 1,
            f"moved up over {_WGMMA}.m64n64k16.f32.bf16.bf16: wgmma.commit_group.sync.aligned": 1,
        }
    ),
    "sm_90a_bwd_post_bf16_d64": Counter({_LATE_PROXY_FENCE: 1}),
    "sm_100f_bwd_post_bf16_d128": _MOVED_IN_POST,
    "sm_100f_bwd_post_bf16_d192x128": _MOVED_IN_POST,
    "sm_100f_bwd_post_bf16_d256": _MOVED_IN_POST,
}
"""The same of instructions that move, of the kernels of which every move has been tried."""
