"""The kernels' PTX is the recorded one: a change of it is on purpose, and named in the list."""

from __future__ import annotations

import dataclasses

import pytest

from kernels.build import cache, texts


def test_texts_are_the_recorded_ones() -> None:
    recorded = texts.recorded()
    if recorded.toolchain != cache.toolchain():
        pytest.skip(f"recorded with {recorded.toolchain}, here is {cache.toolchain()}")
    changed = recorded.changed(texts.built())
    assert not changed, "if that is meant: python -m kernels.build.texts --record"


def test_a_changed_a_missing_and_a_new_text_are_named() -> None:
    before = texts.Texts({}, {"a": "1", "b": "2", "c": "3"})
    after = dataclasses.replace(before, digests={"a": "1", "b": "9", "d": "4"})
    assert before.changed(after) == ["b", "c", "d"]
    assert before.changed(before) == []
