"""Which wing of the emulator may import which, and that modules import each other in no circle."""

from __future__ import annotations

import ast
import graphlib
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "kernels.emulator"
GROUND = {"errors", "memory", "names", "policy", "products", "subnormals", "swizzle", "tensor_map"}
"""Modules of the emulator's own folder that every wing may import."""
DOORS = {"__init__", "launch", "report"}
"""The others there: what users of the emulator import."""
ARROWS = {
    "ptx": set[str](),
    "order": {"ptx"},
    "machine": {"ptx", "order"},
    "instructions": {"ptx", "order", "machine"},
    "timing": {"ptx", "machine"},
    "driver": {"ptx", "doors"},
    "doors": {"ptx", "machine", "instructions"},
    "ground": set[str](),
}
"""What each wing may import beside itself and the ground."""


def modules(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Files of the emulator under a root, by the name that one imports."""
    names = {}
    for path in sorted((root / PACKAGE.replace(".", "/")).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def wing(name: str) -> str:
    """The wing of a module; the emulator's own folder holds two."""
    parts = name.removeprefix(PACKAGE).split(".")[1:]
    if parts and parts[0] in ARROWS:
        return parts[0]
    return "ground" if parts and parts[0] in GROUND else "doors"


def statements(tree: ast.AST, for_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports, wherever they stand; those for annotations alone if one asks for them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            if for_types:
                yield from statements(node, for_types)
        else:
            yield from statements(node, for_types)


def imported(path: pathlib.Path, known: set[str], for_types: bool) -> set[str]:
    """The emulator's modules that a file imports, or from which it imports a name."""
    found = set()
    for node in statements(ast.parse(path.read_text()), for_types):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{path}: relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module or "" for name in whole]
        found.update(name for name in names if name in known)
    return found


def wrong_arrows(root: pathlib.Path) -> list[str]:
    """Imports that no arrow allows."""
    files = modules(root)
    return [
        f"{name} imports {other}"
        for name, path in files.items()
        for other in sorted(imported(path, set(files), for_types=True))
        if wing(other) not in {wing(name), "ground", *ARROWS[wing(name)]}
    ]


def circle(root: pathlib.Path) -> list[str]:
    """Modules that import each other in a circle when the program runs; none if there is none."""
    files = modules(root)
    graph = {name: imported(path, set(files), for_types=False) for name, path in files.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_file_has_its_wing():
    folder = ROOT / PACKAGE.replace(".", "/")
    assert {path.stem for path in folder.glob("*.py")} == GROUND | DOORS
    assert {path.parent.name for path in folder.glob("*/*.py")} == ARROWS.keys() - {
        "ground",
        "doors",
    }


def test_arrows_between_wings_go_one_way():
    assert wrong_arrows(ROOT) == []
    list(graphlib.TopologicalSorter(ARROWS).static_order())


def test_no_modules_import_each_other_in_a_circle():
    assert circle(ROOT) == []


@pytest.mark.parametrize(
    ("text", "arrows", "circles"),
    [
        ("from kernels.emulator.machine.warp import Warp\n", 1, True),
        ("from kernels.emulator.machine import warp\n", 1, True),
        ("import kernels.emulator.machine.warp\n", 1, True),
        ("def f():\n    from kernels.emulator.machine.warp import Warp\n", 1, True),
        ("if TYPE_CHECKING:\n    from kernels.emulator.machine.warp import Warp\n", 1, False),
        ("from kernels.emulator.memory import Region\n", 0, False),
    ],
)
def test_an_arrow_that_points_back_is_noticed(
    tmp_path: pathlib.Path, text: str, arrows: int, circles: bool
):
    files = {
        "memory": "",
        "ptx/program": text,
        "machine/__init__": "",
        "machine/warp": "from kernels.emulator.ptx import program\n",
    }
    for name, content in files.items():
        path = tmp_path / "kernels/emulator" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert len(wrong_arrows(tmp_path)) == arrows
    assert bool(circle(tmp_path)) == circles
