"""Uses of rings: every barrier in turn, and the parity of each phase in turn."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kernels.common.ring import nth_use


@given(st.integers(0, 1000), st.integers(1, 9))
def test_uses_go_round_the_ring(n, stages):
    on_integers: Any = nth_use
    use = on_integers(n, stages)
    assert int(use.slot) == n % stages
    assert use.parity == n // stages % 2
