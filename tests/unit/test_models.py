"""The attention of models' layers is right, and the check sees when it is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from examples import models
from examples.models import LAYERS, Arrays, Layer, attend, check, timed_case

LENGTH = 160


def small(layer: Layer) -> Layer:
    """The layer with a window or a chunk that hides keys of rows of LENGTH."""
    shrunk = {name: 11 for name in ("window", "chunk") if getattr(layer, name) is not None}
    return dataclasses.replace(layer, **shrunk)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_layers_are_right(layer: Layer, seed: int):
    verdicts = check(small(layer), LENGTH, seed)
    assert [v.name for v in verdicts] == list(models.NAMES[: 4 + layer.sinks])
    assert not [v for v in verdicts if v.failure]


WRONG = {
    "a key more in the window": {"window": 12},
    "no window": {"window": None},
    "another cap": {"soft_cap": 45.0},
    "another scale": {"scale": 0.1},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_seen(name: str, seed: int):
    layer = Layer("all", (2, 1), 64, window=11, soft_cap=3.0, sinks=True)

    def other(layer: Layer, x: Arrays, ids: jax.Array) -> jax.Array:
        return attend(dataclasses.replace(layer, **WRONG[name]), x, ids)

    assert any(v.failure for v in check(layer, LENGTH, seed, other))


def test_missing_sinks_and_segments_are_seen(seed: int):
    layer = Layer("sinks", (2, 1), 64, sinks=True)

    def without(layer: Layer, x: Arrays, ids: jax.Array) -> jax.Array:
        return attend(layer, x | {"sinks": x["sinks"] * 0 - 30}, ids)

    def in_one_document(layer: Layer, x: Arrays, ids: jax.Array) -> jax.Array:
        return attend(layer, x, ids * 0)

    for wrong in (without, in_one_document):
        assert any(v.failure for v in check(layer, LENGTH, seed, wrong))


def test_timed_documents_end_with_chunks():
    layer = Layer("chunked", (2, 1), 64, chunk=96)
    case = timed_case(layer, 2, 400)
    for row in case.documents or ():
        ends: list[Any] = np.cumsum(row).tolist()
        assert ends[-1] == 400 and {96, 192, 288, 384} <= set(ends)


def test_checked_rows_are_longer_than_the_window():
    assert [layer.check_length(10240) for layer in LAYERS if layer.window == 4096] == [5120]
    assert LAYERS[-1].check_length(10240) == 10240
    assert LAYERS[0].check_length(10240) == 512
