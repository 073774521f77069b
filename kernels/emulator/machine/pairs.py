"""The two CTAs of a pair, which tcgen05 instructions with cta_group::2 work on."""

from __future__ import annotations

import numpy as np

from kernels.emulator.machine.cta import Cta
from kernels.emulator.machine.warp import Warp
from kernels.emulator.memory import Fault


def peer_of(warp: Warp) -> Cta:
    """The other CTA of the pair: its rank differs in the lowest bit."""
    cluster, rank = warp.cta.cluster, warp.cta.rank
    if len(cluster.ctas) % 2:
        raise Fault("cta-pair", f"cta_group::2 in a cluster of {len(cluster.ctas)} CTAs")
    return cluster.of_rank(rank ^ 1)


def pair_of(warp: Warp, thread: int) -> tuple[Cta, Cta]:
    """Both CTAs of the pair, the even rank first; the thread must know that the other runs."""
    peer = peer_of(warp)
    if peer.order is not None:
        peer.order.check_started(np.array([thread]))
    own = warp.cta
    return (own, peer) if own.rank < peer.rank else (peer, own)
