"""Clocks of a cluster, asked directly: what no program of a few lines can tell apart."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.memory import Fault
from kernels.emulator.order.clocks import Clocks
from kernels.emulator.order.shared_memory import SharedOrder


@pytest.mark.parametrize(
    ("writer_fences", "reader_fences", "legal"),
    [
        (None, None, False),
        ("shared:cta", None, True),
        ("shared:cluster", None, True),
        ("", None, True),
        ("global", None, False),
        (None, "shared:cta", False),
        (None, "shared:cluster", False),
        (None, "", False),
    ],
)
def test_a_proxy_fence_counts_for_what_its_own_thread_wrote(
    writer_fences: str | None, reader_fences: str | None, legal: bool
) -> None:
    """A thread of CTA 1 writes there and releases to one of CTA 0, whose product reads it."""
    clocks = Clocks(2, 32, tensor=True)
    order = SharedOrder(clocks, 1, 1024)
    reader, writer = np.array([0]), np.array([32])
    order.thread_writes(writer, np.array([64]), 16)
    if writer_fences is not None:
        clocks.fence_proxy(writer, 1, writer_fences)
    clocks.acquire(reader, clocks.release(writer))
    if reader_fences is not None:
        clocks.fence_proxy(reader, 0, reader_fences)

    def read() -> None:
        order.pipe_reads(0, np.array([4]), clocks.first_pipe, 1)

    if legal:
        read()
        return
    with pytest.raises(Fault) as caught:
        read()
    assert caught.value.rule == "proxy-fence"
