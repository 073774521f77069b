"""The order of work: every tile of every head once, sections of heads one after the other."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kernels.common.schedule import HeadOrder, nth_tile


@given(st.integers(1, 200_000), st.integers(1, 9), st.integers(1, 9))
def test_every_tile_of_every_head_comes_once_and_sections_stay_together(section, heads, tiles):
    on_integers: Any = nth_tile
    order = [on_integers(index, section, heads, tiles) for index in range(heads * tiles)]
    assert sorted(order) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    sections = [head // section for _, head in order]
    assert sections == sorted(sections)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(order)) or section < heads


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_every_head_comes_once_and_groups_stay_together(batch, groups, group, together):
    of_call: Any = (batch, groups * group, group, together)
    order = HeadOrder(*of_call)
    places: list[Any] = list(range(batch * groups * group))
    found = [(order.batch_of(i), order.head_of(i, order.batch_of(i))) for i in places]
    assert len(set(found)) == len(found)
    assert {b for b, _ in found} == set(range(batch))
    assert {head for _, head in found} == set(range(groups * group))
    # A group's heads follow each other, and its batch elements do, if they are to.
    runs = [(b, head // group) for b, head in found[::group]]
    assert found[::group] == [(b, of_group * group) for b, of_group in runs]
    assert runs == sorted(runs, key=lambda run: run[::-1] if together else run)
