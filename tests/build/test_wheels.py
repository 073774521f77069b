"""What a wheel's library may need from the machine and show to its process."""

from __future__ import annotations

import json
import pathlib
import platform
import subprocess
import zipfile
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fa4_jax import runtime
from kernels.build import wheels
from tests.ffi import compiler

HERE = platform.machine()
MakeWheel = Callable[[str], pathlib.Path]
TAG = "manylinux_{}_{}".format(*wheels.GLIBC)


def test_library_exports_only_ours() -> None:
    # Weak symbols of C++ templates were among them: two libraries of a process would share them.
    exported = wheels.exported(pathlib.Path(runtime._LIBRARY))
    assert "fa4_jax_execute" in exported
    assert [name for name in exported if not name.startswith("fa4_jax_")] == []


@pytest.fixture
def make_wheel(tmp_path: pathlib.Path) -> MakeWheel:
    """Puts a library of one C++ source into a wheel."""

    def make(source: str) -> pathlib.Path:
        code, library, wheel = (tmp_path / name for name in ("a.cc", "a.so", "a.whl"))
        code.write_text(source)
        compiler.shared_library(library, code)
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(library, "fa4_jax/libfa4_jax.so")
        return wheel

    return make


def test_a_library_that_shows_its_own_names_passes(make_wheel: MakeWheel) -> None:
    wheels.check(make_wheel('extern "C" int fa4_jax_one() { return 1; }'), HERE)


def test_another_processor_is_refused(make_wheel: MakeWheel) -> None:
    wheel = make_wheel('extern "C" int fa4_jax_one() { return 1; }')
    (other,) = set(wheels.PROCESSORS) - {HERE}
    with pytest.raises(wheels.WheelError, match=f"is for {HERE}, not for {other}"):
        wheels.check(wheel, other)


def test_other_exports_are_refused(make_wheel: MakeWheel) -> None:
    with pytest.raises(wheels.WheelError, match=r"exports visible$"):
        wheels.check(make_wheel('extern "C" int visible() { return 1; }'), HERE)


def test_a_shared_cpp_library_is_refused(make_wheel: MakeWheel) -> None:
    source = '#include <new>\nextern "C" void* fa4_jax_new() { return new int; }'
    with pytest.raises(wheels.WheelError, match=r"needs libstdc\+\+.so.6$"):
        wheels.check(make_wheel(source), HERE)


@pytest.mark.parametrize(
    ("found", "fit"),
    [("manylinux_2_17", True), (TAG, True), ("manylinux_2_34", False), ("linux", False)],
)
def test_auditwheels_tag_decides(found: str, fit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"overall_tag": f"{found}_{HERE}"})
    done = SimpleNamespace(returncode=0, stdout=answer, stderr="")
    monkeypatch.setattr(wheels, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
    if fit:
        wheels.audit(pathlib.Path("a.whl"), HERE)
    else:
        with pytest.raises(wheels.WheelError, match=f"fit for {found}_{HERE} only"):
            wheels.audit(pathlib.Path("a.whl"), HERE)


def test_a_failure_of_auditwheel_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="no such wheel")
    monkeypatch.setattr(wheels, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
    with pytest.raises(wheels.WheelError, match="no such wheel"):
        wheels.audit(pathlib.Path("a.whl"), HERE)
