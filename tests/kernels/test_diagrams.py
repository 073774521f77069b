"""The page of the kernels is what their descriptions say now; its pictures are well-formed."""

from __future__ import annotations

import pathlib
from xml.etree import ElementTree

import pytest

from fa4_jax import catalogue
from kernels import description as parts
from kernels import diagrams, memory_maps

DOCS = pathlib.Path(__file__).parents[2] / "docs"
FILES = diagrams.files()


@pytest.mark.parametrize("path", FILES)
def test_the_file_is_current(path: str) -> None:
    current = (DOCS / path).read_text() == FILES[path]
    assert current, "run python -m kernels.diagrams docs"


def test_there_are_no_other_maps() -> None:
    assert diagrams.maps_in(DOCS) == {path for path in FILES if path.endswith(".svg")}


def test_every_kernel_that_is_shown_exists() -> None:
    assert {shown.key for shown in diagrams.SHOWN} <= set(catalogue.all_keys())


@pytest.mark.parametrize("path", [path for path in FILES if path.endswith(".svg")])
def test_pictures_are_well_formed(path: str) -> None:
    """Every bar lies inside the picture."""
    root = ElementTree.fromstring(FILES[path])
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    bars = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(bars) > 1
    for bar in bars:
        x, y = float(bar.attrib.get("x", 0)), float(bar.attrib.get("y", 0))
        assert x >= 0 and x + float(bar.attrib["width"]) <= width
        assert y >= 0 and y + float(bar.attrib["height"]) <= height


def _small() -> parts.Description:
    roles = (parts.Role("a", 0, 1, "loads"), parts.Role("b", 1, 4, "computes"))
    barriers = (
        parts.Barrier("full", (parts.copied("a"),), ("b",), "step", 2),
        parts.Barrier("ready", (parts.committed("b"),), ("b",), "step"),
    )
    regions = (
        parts.Region("x", (256,), "", "f32", alignment=1024),
        parts.Region("y", (256,), "", "f32", shares="x"),
    )
    named = (parts.NamedBarrier("met", 1, 128, ("b",), ""),)
    columns = (parts.Columns("s", 0, 64, "", 2, 128), parts.Columns("p", 32, 32, "", shares="s"))
    return parts.Description(
        roles, barriers, named, regions, parts.Division(1), tensor_memory=columns
    )


def test_graphs_have_an_arrow_for_every_pair_of_roles() -> None:
    lines = diagrams.graph(_small()).splitlines()
    assert '  a["a<br/>warp 0"]' in lines and '  b["b<br/>warps 1 to 4"]' in lines
    assert '  a ==>|"full [2]"| b' in lines
    assert '  b -.->|"ready"| b' in lines
    assert '  b ---|"met"| b' in lines


def test_maps_have_what_lies_in_memory() -> None:
    shared = {bar.name: bar for bar in memory_maps.shared_memory(_small()).bars}
    assert shared["mbarriers"].spans == ((0, 24),)
    assert shared["x"].spans == shared["y"].spans == ((1024, 2048),)
    assert [name for name, bar in shared.items() if bar.shares] == ["y"]
    tensor = memory_maps.tensor_memory(_small())
    assert [bar.spans for bar in tensor.bars] == [((0, 64), (128, 192)), ((32, 64),)]
    assert "128 of 512 columns" in tensor.title
