"""What no trial notices of the kernels' mutations, by kernel and kind.

docs/emulator/proof.md proves each of these redundant, or says what is blind.
"""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from collections.abc import Mapping

_REGISTERS = "removed: setmaxnreg.inc.sync.aligned.u32"
_TRY_WAIT = "mbarrier.try_wait.parity.shared.b64"
_WAIT = f"never waits: {_TRY_WAIT}"
_PRODUCT_FENCE = "removed: wgmma.fence.sync.aligned"
_PRODUCT_GROUP = "removed: wgmma.commit_group.sync.aligned"
_MEETING = "removed: bar.warp.sync"
_BULK_WAIT = "cp.async.bulk.wait_group"
_STORED = f"waits for reads: {_BULK_WAIT}"
_GLOBAL_FENCE = "removed: fence.proxy.async.global"
_PRODUCTS = Counter({_PRODUCT_FENCE: 3, _PRODUCT_GROUP: 1})
_MASKED_FACTOR = Counter(
    {f"{change}: bar.arrive": 1 for change in ("removed", "more threads", "fewer threads")}
)
_LAST_STORES = Counter(
    {
        f"{change}: {_BULK_WAIT}": 1
        for change in ("removed", "waits for reads", "waits for all but one more")
    }
)
_OF_BAND = Counter({_REGISTERS: 1, _PRODUCT_FENCE: 3, _STORED: 1})
_OWN_ROWS = Counter({"removed: bar.sync": 1})
_OF_PAIR = Counter({_REGISTERS: 1, "relaxed: barrier.cluster.arrive": 1})
_PADDING_FENCES = Counter({"removed: fence.acq_rel.cluster": 3})

SURVIVORS: dict[str, Counter[str]] = {
    "sm_100f_fwd_bf16_d128": _MASKED_FACTOR + Counter({_REGISTERS: 1, _MEETING: 2}),
    "sm_100f_fwd_bf16_d128_band": Counter({_REGISTERS: 1, _MEETING: 2}),
    "sm_100f_fwd_bf16_d128_band_pair": _OF_PAIR + _PADDING_FENCES + Counter({_MEETING: 6}),
    "sm_100f_fwd_bf16_d128_band_ranges_pair": _OF_PAIR + _PADDING_FENCES + Counter({_MEETING: 6}),
    "sm_100f_fwd_bf16_d128_pair": _MASKED_FACTOR
    + _OF_PAIR
    + _PADDING_FENCES
    + Counter({_MEETING: 6}),
    "sm_100f_fwd_bf16_d64_band_pair": _OF_PAIR + _PADDING_FENCES + Counter({_MEETING: 6}),
    "sm_100f_fwd_bf16_d64_band_ranges_pair": _OF_PAIR + _PADDING_FENCES + Counter({_MEETING: 6}),
    "sm_100f_fwd_bf16_d64_pair": _MASKED_FACTOR
    + _OF_PAIR
    + _PADDING_FENCES
    + Counter({_MEETING: 6}),
    "sm_100f_tangent_bf16_d64_band": Counter({_WAIT: 1}),
    "sm_100f_fwd_bf16_d256": _MASKED_FACTOR + _OF_PAIR + Counter({_MEETING: 4}),
    "sm_100f_fwd_bf16_d256_band": _OF_PAIR + Counter({_MEETING: 4}),
    "sm_100f_bwd_bf16_d64": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d64_deterministic": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d128": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d128_band_deterministic": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d192x128": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d192x128_deterministic": Counter({_REGISTERS: 2}),
    "sm_100f_bwd_bf16_d128_pair": _OF_PAIR,
    "sm_100f_bwd_bf16_d128_band_deterministic_pair": Counter({_REGISTERS: 1}),
    "sm_100f_bwd_bf16_d128_band_ranges_deterministic_pair": Counter({_REGISTERS: 1}),
    "sm_100f_bwd_bf16_d192x128_pair": _OF_PAIR,
    "sm_100f_bwd_bf16_d192x128_deterministic_pair": Counter({_REGISTERS: 1}),
    "sm_100f_bwd_bf16_d128_band_pair": _OF_PAIR,
    "sm_100f_bwd_bf16_d128_band_ranges_pair": _OF_PAIR,
    "sm_100f_bwd_bf16_d128_deterministic_pair": Counter({_REGISTERS: 1}),
    "sm_100f_bwd_bf16_d192x128_band_pair": _OF_PAIR,
    "sm_100f_bwd_bf16_d192x128_band_deterministic_pair": Counter({_REGISTERS: 1}),
    "sm_100f_bwd_bf16_d192x128_band_ranges_pair": _OF_PAIR,
    "sm_100f_bwd_bf16_d192x128_band_ranges_deterministic_pair": Counter({_REGISTERS: 1}),
    "sm_100f_bwd_bf16_d256": _OF_PAIR,
    "sm_100f_bwd_bf16_d256_deterministic": Counter({_REGISTERS: 1}),
    "sm_100f_bwd_post_bf16_d128": Counter(),
    "sm_100f_bwd_post_bf16_d192x128": Counter(),
    "sm_100f_bwd_post_bf16_d256": Counter(),
    "sm_90a_fwd_split_bf16_d64": Counter({_PRODUCT_FENCE: 1, _PRODUCT_GROUP: 1}),
    "sm_90a_fwd_split_bf16_d64_paged": Counter({_PRODUCT_FENCE: 1, _PRODUCT_GROUP: 1}),
    "sm_90a_fwd_join_bf16_d64": Counter(),
    "sm_90a_fwd_bf16_d64": Counter(
        {_REGISTERS: 1, _PRODUCT_FENCE: 1, _STORED: 1, "removed: mbarrier.arrive.shared.b64": 1}
    ),
    "sm_90a_fwd_bf16_d64_band_sinks": _OF_BAND,
    "sm_90a_fwd_bf16_d64_band_sinks_short": _OF_BAND,
    "sm_90a_fwd_bf16_d64_band_sinks_narrow": _OF_BAND,
    "sm_90a_fwd_bf16_d128_band": _OF_BAND,
    "sm_90a_fwd_bf16_d256_band": Counter({_REGISTERS: 1, _PRODUCT_FENCE: 3}) + _LAST_STORES,
    "sm_90a_tangent_bf16_d64_band": _LAST_STORES
    + Counter({_REGISTERS: 1, _PRODUCT_FENCE: 7, _PRODUCT_GROUP: 5, _MEETING: 1}),
    "sm_90a_hessian_q_bf16_d64_band": _OWN_ROWS
    + Counter({_REGISTERS: 1, _PRODUCT_FENCE: 5, _PRODUCT_GROUP: 3, _STORED: 1}),
    "sm_90a_hessian_kv_bf16_d64_band": _OWN_ROWS
    + Counter({_REGISTERS: 1, _PRODUCT_FENCE: 6, _PRODUCT_GROUP: 4, _STORED: 1}),
    "sm_90a_bwd_bf16_d64_deterministic": _PRODUCTS
    + Counter({_REGISTERS: 1, _WAIT: 1, _STORED: 1, _GLOBAL_FENCE: 4})
    + Counter({_MEETING: 1, "removed: bar.sync": 1}),
    "sm_90a_bwd_bf16_d128": _PRODUCTS
    + _LAST_STORES
    + Counter({_REGISTERS: 1, _WAIT: 1, _STORED: 1, _MEETING: 1, "removed: bar.sync": 1})
    + Counter({_GLOBAL_FENCE: 1}),
    "sm_90a_bwd_bf16_d256_deterministic": Counter(
        {
            _REGISTERS: 1,
            _MEETING: 1,
            _PRODUCT_FENCE: 6,
            _PRODUCT_GROUP: 1,
            _STORED: 2,
            _WAIT: 3,
        }
    ),
    "sm_90a_bwd_post_bf16_d64": Counter({_STORED: 1}),
}
"""Kernels, and what is not noticed when one of their instructions is dropped, weakened or counts
otherwise: docs/emulator/proof.md proves each of these redundant. The preprocessing kernels
synchronise nothing."""

_MOVED = pathlib.Path(__file__).with_name("moved_survivors.json")
MOVED_SURVIVORS: dict[str, Counter[str]] = {
    name: Counter(kinds) for name, kinds in json.loads(_MOVED.read_text()).items()
}
"""The same of instructions that move; `mutation_score --kind moved --write` makes the file."""


def write_moved(survivors: Mapping[str, Counter[str]]) -> None:
    """Keeps what survives of the moves of every kernel."""
    plain = {name: dict(sorted(kinds.items())) for name, kinds in sorted(survivors.items())}
    _MOVED.write_text(json.dumps(plain, indent=1) + "\n")
