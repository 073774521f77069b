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


def test_there_is_one_of_each_kind() -> None:
    held = set(map(sample.kind, sample.kernels()))
    assert not [key.name for key in catalogue.all_keys() if sample.kind(key) not in held]


def test_a_kind_is_all_but_head_dims_and_storage_type() -> None:
    plain = KernelKey("sm_90a", Pass.FORWARD, "bf16", 64)
    wide, band = (dataclasses.replace(plain, **x) for x in (WIDE, {"band": True}))
    keys = [wide, plain, dataclasses.replace(band, dtype="fp16"), band]
    assert sample.one_of_each_kind(keys) == {plain, band}
    backward = dataclasses.replace(plain, kernel=Pass.BACKWARD)
    other_program = dataclasses.replace(backward, **WIDE)
    assert sample.one_of_each_kind([backward, other_program]) == {backward, other_program}


@pytest.mark.parametrize("name", sample.CALLED)
def test_what_is_called_exists(name: str) -> None:
    assert fnmatch.filter(NAMES, name)


def test_kernels_come_with_their_bf16_ones_and_those_before_them() -> None:
    held = {key.name for key in sample.kernels()}
    assert held <= NAMES
    twins = {name.replace("_fp16_", "_bf16_") for name in held}
    joins = {name.replace("_fwd_join_", "_fwd_split_") for name in held}
    posts = {name.replace("_bwd_post_", "_bwd_pre_") for name in held}
    assert twins | joins | posts <= held


def test_it_is_a_small_part_where_all_sources_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "unknown", set[KernelKey])
    assert len(sample.kernels()) < len(NAMES) / 4, "it would take longer than it is meant to"
