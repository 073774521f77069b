"""The order of work: every tile of every head once, sections of heads one after the other."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kernels.common.schedule import nth_tile


@given(st.integers(1, 200_000), st.integers(1, 9), st.integers(1, 9))
def test_every_tile_of_every_head_comes_once_and_sections_stay_together(section, heads, tiles):
    on_integers: Any = nth_tile
    order = [on_integers(index, section, heads, tiles) for index in range(heads * tiles)]
    assert sorted(order) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    sections = [head // section for _, head in order]
    assert sections == sorted(sections)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(order)) or section < heads
