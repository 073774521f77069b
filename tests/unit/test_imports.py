"""The rules for imports hold, and importing is light."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import fa4_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = sorted((ROOT / "fa4_jax").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in LIBRARY]
# The modules that each adapter in fa4_jax/integrations may import beyond the rest of the library.
ADAPTED = {
    "ejkernel": {"ejkernel"},
    "equinox": {"equinox"},
    "levanter": {"haliax", "levanter"},
    "maxtext": {"maxtext"},
    "tokamax": {"tokamax"},
}


def imported(path: pathlib.Path) -> set[str]:
    """Returns full names of the modules that a file imports, and of what it imports from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", LIBRARY, ids=NAMES)
def test_the_library_needs_only_jax_and_numpy(path: pathlib.Path):
    roots = {name.split(".")[0] for name in imported(path)}
    allowed = {"fa4_jax", "jax", "jaxlib", "numpy", "ml_dtypes"} | set(sys.stdlib_module_names)
    if path.parent.name == "integrations":
        allowed |= ADAPTED.get(path.stem, set())
    assert roots <= allowed


@pytest.mark.parametrize("path", LIBRARY, ids=NAMES)
def test_only_the_user_imports_an_adapter(path: pathlib.Path):
    adapters = {x for x in imported(path) if x.startswith("fa4_jax.integrations.")}
    assert not adapters


@pytest.mark.parametrize("path", LIBRARY, ids=NAMES)
def test_one_module_calls_the_ffi_and_one_binds_it(path: pathlib.Path):
    text = path.read_text()
    if path.name not in ("ffi_call.py", "runtime.py"):
        assert "jax.ffi" not in text
    assert "jax._src" not in text


@pytest.mark.parametrize("name", ["bands", "key", "manifest", "catalogue", "problem", "plan"])
def test_what_build_and_emulator_read_imports_no_jax(name: str):
    names = imported(ROOT / "fa4_jax" / f"{name}.py")
    assert not {x for x in names if x.split(".")[0] in ("jax", "numpy")}


def modules_of_the_library(path: pathlib.Path) -> set[str]:
    """Returns the modules of fa4_jax that a file imports, or from which it imports a name."""
    found = set()
    for name in imported(path):
        place, parts = ROOT, name.split(".")
        if parts[0] != "fa4_jax":
            continue
        while parts and ((place / parts[0]).is_dir() or (place / f"{parts[0]}.py").is_file()):
            place /= parts.pop(0)
        found.add(".".join(place.relative_to(ROOT).parts))
    return found - {"fa4_jax"}


def test_modules_of_the_library_are_told_from_their_names(tmp_path: pathlib.Path):
    file = tmp_path / "file.py"
    file.write_text(
        "import fa4_jax.conformance.cases\n"
        "from fa4_jax.key import KernelKey\n"
        "from fa4_jax import plan\n"
    )
    expected = {"fa4_jax.conformance.cases", "fa4_jax.key", "fa4_jax.plan"}
    assert modules_of_the_library(file) == expected


def test_kernels_import_only_the_vocabulary():
    allowed = {f"fa4_jax.{name}" for name in ("bands", "catalogue", "key", "manifest")}
    for path in (ROOT / "kernels").rglob("*.py"):
        assert modules_of_the_library(path) <= allowed, path


def test_modules_are_reached_by_the_package_alone():
    script = """
import sys
import fa4_jax
assert "fa4_jax.parallel" not in sys.modules
assert fa4_jax.parallel.Ring and fa4_jax.flax.make_attention_fn
assert not {"flax"} & set(sys.modules)
assert set(fa4_jax.__all__) <= set(dir(fa4_jax))
assert not hasattr(fa4_jax, "no_such_module")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_says_its_version_and_that_it_is_typed():
    assert re.fullmatch(r"\d+\.\d+\.\d+", fa4_jax.__version__)
    assert (ROOT / "fa4_jax" / "py.typed").exists()


def test_importing_starts_no_backend_and_needs_no_flax():
    script = """
import sys
import fa4_jax, fa4_jax.flax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert not {"flax", "torch", "cutlass", "kernels"} & set(sys.modules)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
