"""The tables hold no tile that a Hopper GPU refuses; test_descriptions.py has the budgets."""

import dataclasses

import pytest

from fa4_jax.key import DENSE_TILES, HEAD_DIM_TILES, NARROW_VALUES, SHORT_TILES, Pass
from kernels.common.bias_gradient_work import Work
from kernels.sm90 import bias_gradient_description, tiles

FORWARDS = [*tiles.FORWARD_TILES.items(), *tiles.DENSE_FORWARD_TILES.items()]


@pytest.mark.parametrize(("key", "tile"), FORWARDS, ids=str)
def test_forward_tiles_fit(key, tile):
    head_dim, value_dim, *_ = key
    assert tile.m % 64 == 0 and tile.n % 16 == 0 and tile.n <= 256
    assert head_dim * 2 % tile.span_bytes == value_dim * 2 % tile.span_bytes == 0
    assert 0 <= tile.q_slices * 16 <= head_dim
    # A thread has at most 240 registers with two warpgroups, 160 with three.
    assert tile.q_slices == 0 or tile.mma_warpgroups == 2


def test_tiles_of_dense_forwards_are_those_of_the_plan():
    for (head_dim, value_dim), tile in tiles.DENSE_FORWARD_TILES.items():
        band = tiles.FORWARD_TILES[head_dim, value_dim, False]
        of_plan = DENSE_TILES["sm_90a", head_dim]
        assert (tile.m, band.m) == (of_plan.tall_rows, of_plan.rows)
    assert {d for _, d in DENSE_TILES} == {d for d, _ in tiles.DENSE_FORWARD_TILES}


@pytest.mark.parametrize("head_dims", list(tiles.BACKWARD_TILES), ids=str)
def test_backward_tiles_fit(head_dims):
    tile, (head_dim, value_dim) = tiles.BACKWARD_TILES[head_dims], head_dims
    assert (tile.n, tile.ctas) in ((128, 1), (64, 2))
    assert tile.m in (64, 128)
    columns = head_dim if tile.split_rows else head_dim // tile.ctas // 2
    assert columns * 2 % tile.key_span_bytes == 0, "a warpgroup's columns of dQ are whole spans"
    assert head_dim * 2 % tile.span_bytes == value_dim * 2 % tile.span_bytes == 0
    assert head_dim == value_dim or tile.ctas == 2, "only pairs have two head dims"


@pytest.mark.parametrize("head_dim", sorted({d for d, _ in tiles.BACKWARD_TILES}))
def test_a_ring_has_a_slot_more_than_a_product_has_parts(head_dim):
    """Parts of S are freed only when the first part of dP has come, in the gradient of a bias."""
    parts = head_dim // bias_gradient_description.columns_of_part(head_dim)
    assert bias_gradient_description.stages(head_dim) > parts


def test_the_words_of_a_gradients_tile_are_its_work_and_whether_any_is_seen():
    assert len(dataclasses.fields(Work)) + 1 == bias_gradient_description.WORK_WORDS


@pytest.mark.parametrize("tile", tiles.BACKWARD_TILES.values(), ids=str)
def test_backward_parts_divide_a_step(tile):
    assert 0 <= tile.first_slices < tile.m // 16
    assert tile.dq_buffers == 2 or tile.persistent
    for deterministic, soft_cap in ((True, False), (False, True), (True, True)):
        own = tile.of_kernel(deterministic, soft_cap)
        assert own.first_slices == 0, "capped kernels compute P and dS together"
        assert own.dq_buffers == 2, "two warps wait for turns at once"


def test_every_head_dim_has_tiles():
    def head_dims(kernel):
        narrow = {
            (d, dv)
            for (arch, of, d), dv in NARROW_VALUES.items()
            if (arch, of) == ("sm_90a", kernel)
        }
        return narrow | {(d, d) for d in HEAD_DIM_TILES}

    short = {(d, d, True) for arch, d in SHORT_TILES if arch == "sm_90a"}
    for d, _, _ in short:
        rows = tiles.FORWARD_TILES[d, d, True].m, tiles.FORWARD_TILES[d, d, False].m
        of_plan = SHORT_TILES["sm_90a", d]
        assert rows == (of_plan.rows, of_plan.tall_rows)
    tall = {(*dims, False) for dims in head_dims(Pass.FORWARD)}
    assert set(tiles.FORWARD_TILES) == tall | short
    assert set(tiles.BACKWARD_TILES) == head_dims(Pass.BACKWARD)
