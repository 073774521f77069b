"""The kernels' PTX is the recorded one: a change of it is on purpose, and named in the list."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from kernels.build import cache, sample, texts

HINT = "build them (python -m kernels.build); if it is meant, add: -m kernels.build.texts --record"
MODULES = {"a": "one", "b": "one", "c": "two"}
RECORDED = texts.Texts({}, {"one": "x", "two": "y"}, {"a": "1", "b": "2", "c": "3"})


def test_texts_are_the_recorded_ones() -> None:
    """Those that are built; of the others sources and compiler are those of the record."""
    recorded = texts.recorded()
    if recorded.toolchain != cache.toolchain():
        pytest.skip(f"recorded with {recorded.toolchain}, here is {cache.toolchain()}")
    assert not recorded.changed(texts.built(), texts.modules()), HINT


def changed(digests: dict[str, str], sources: dict[str, str] | None = None) -> list[str]:
    """Returns what differs from RECORDED where these kernels are built."""
    now = texts.Texts({}, RECORDED.sources | (sources or {}), digests)
    return RECORDED.changed(now, MODULES)


def test_a_changed_text_is_named() -> None:
    assert changed(RECORDED.digests) == []
    assert changed(RECORDED.digests | {"b": "9"}) == ["b"]


def test_a_missing_and_a_new_kernel_are_named() -> None:
    now = dataclasses.replace(RECORDED, digests={"a": "1", "d": "4"})
    assert RECORDED.changed(now, {"a": "one", "c": "two", "d": "two"}) == ["b", "d"]


def test_what_is_not_built_has_the_text_of_its_sources() -> None:
    assert changed({}) == []
    assert changed({}, {"one": "z"}) == ["a", "b"]
    assert changed({"a": "1"}, {"one": "z"}) == ["b"]
    assert changed({"a": "1", "b": "2"}, {"one": "z"}) == []
    assert changed({}, {"new": "z"}) == []


@pytest.fixture
def other_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> set[str]:
    """The record where one module had other sources; returns the names of its kernels."""
    document = json.loads(texts.PATH.read_text())
    module = "kernels.sm90.tangent"
    document["sources"][module] = "of other sources"
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(document))
    monkeypatch.setattr(texts, "PATH", path)
    return {name for name, other in texts.modules().items() if other == module}


def test_kernels_of_changed_sources_are_all_built(other_sources: set[str]) -> None:
    assert other_sources <= {key.name for key in sample.kernels()}
    assert other_sources <= {key.name for key in texts.unknown()}


def test_changed_sources_without_a_build_are_noticed(
    other_sources: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(cache, "DIRECTORY", tmp_path / "empty")
    assert other_sources <= set(texts.recorded().changed(texts.built(), texts.modules()))
