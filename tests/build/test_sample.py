"""The sample of kernels that `make test` builds has what its tests need."""

from __future__ import annotations

import dataclasses
import fnmatch

import pytest

from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from kernels.build import sample, texts

WIDE = {"head_dim": 256, "value_dim": 256}
NAMES = {key.name for key in catalogue.all_keys()}


def test_every_flag_of_every_module_is_there() -> None:
    held = {feature for key in sample.kernels() for feature in sample.features(key)}
    assert not [key.name for key in catalogue.all_keys() if not sample.features(key) <= held]


def test_the_plainest_kernel_stands_for_a_flag() -> None:
    plain = KernelKey("sm_90a", Pass.FORWARD, "bf16", 64)
    band, wide = (dataclasses.replace(plain, **x) for x in ({"band": True}, WIDE))
    ranges, capped = (dataclasses.replace(band, **x, ranges=True) for x in ({}, {"soft_cap": True}))
    fp16 = dataclasses.replace(band, dtype="fp16")
    keys = [capped, wide, fp16, ranges, plain, band]
    assert sample.with_every_feature([], keys) == {plain, band, ranges, capped}
    assert sample.with_every_feature([capped], keys) == {capped, plain}
    backward = dataclasses.replace(plain, kernel=Pass.BACKWARD)
    other_program = dataclasses.replace(backward, **WIDE)
    programs = {backward, other_program}
    assert sample.with_every_feature([], programs) == programs


@pytest.mark.parametrize("name", sample.CALLED)
def test_what_is_called_exists(name: str) -> None:
    assert fnmatch.filter(NAMES, name)


def test_kernels_come_with_their_bf16_ones_and_those_before_them() -> None:
    held = {key.name for key in sample.kernels()}
    lone = KernelKey("sm_90a", Pass.BACKWARD, "fp16", 96, band=True)
    held |= {key.name for key in sample.with_companions([lone])}
    assert held <= NAMES
    twins = {name.replace("_fp16_", "_bf16_") for name in held}
    joins = {name.replace("_fwd_join_", "_fwd_split_") for name in held}
    posts = {name.replace("_bwd_post_", "_bwd_pre_") for name in held}
    assert twins | joins | posts <= held
    assert "sm_90a_bwd_pre_fp16_d96" in held


def test_it_is_a_small_part_where_all_sources_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "unknown", set[KernelKey])
    assert len(sample.kernels()) < len(NAMES) / 6, "it would take longer than it is meant to"
