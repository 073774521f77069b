"""What pip's build backend is asked for: which kernels it builds before the wheel."""

from __future__ import annotations

import importlib.util
import pathlib
import zipfile

import pytest

if importlib.util.find_spec("scikit_build_core") is None:
    pytest.skip("pip's backend needs scikit-build-core, which is not here", allow_module_level=True)

from kernels.build import backend, package

MEMBER = bytes(range(256)) * 64


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[list[str]]:
    """What the backend runs, where there are no kernels yet; the wheel itself is not built."""
    ran: list[list[str]] = []
    monkeypatch.delenv(backend.ARCHS_VARIABLE, raising=False)
    monkeypatch.setattr(backend, "KERNELS", tmp_path / "_cubins")
    monkeypatch.setattr(backend.subprocess, "run", lambda command, **_: ran.append(command[3:]))
    member = zipfile.ZipInfo("fa4_jax/library.so", (2026, 1, 2, 3, 4, 6))
    member.external_attr = 0o755 << 16
    wheel = tmp_path / "wheel"  # An absolute path, wherever the caller wants it.
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, MEMBER, zipfile.ZIP_STORED)
    monkeypatch.setattr(backend.base, "build_wheel", lambda folder, settings, metadata: str(wheel))
    return ran


@pytest.mark.parametrize("archs", ["all", "sm_90a", "sm_100f"])
def test_an_architecture_can_be_chosen(
    commands: list[list[str]], archs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pathlib.Path(backend.build_wheel("dist", {"archs": archs})).name == "wheel"
    monkeypatch.setenv(backend.ARCHS_VARIABLE, archs)
    backend.build_wheel("dist")
    assert commands == [["--arch", archs]] * 2


def test_a_wheel_is_compressed(commands: list[list[str]]) -> None:
    del commands
    with zipfile.ZipFile(backend.build_wheel("dist", {"archs": "none"})) as archive:
        (member,) = archive.infolist()
        assert member.date_time == (2026, 1, 2, 3, 4, 6) and member.external_attr >> 16 == 0o755
        assert archive.read(member) == MEMBER and member.compress_size < len(MEMBER) / 10


def test_all_are_built_where_there_are_none(commands: list[list[str]]) -> None:
    backend.build_wheel("dist")
    backend.KERNELS.mkdir()
    (backend.KERNELS / "manifest.json").write_text("{}")
    backend.build_wheel("dist")
    assert commands == [["--arch", "all"]]


def test_all_are_built_where_some_are_missing(commands: list[list[str]]) -> None:
    """`make test` leaves a sample of the kernels."""
    package.package([], backend.KERNELS, partial=True)
    backend.build_wheel("dist")
    package.package([], backend.KERNELS)
    backend.build_wheel("dist")
    assert commands == [["--arch", "all"]]


def test_none_builds_and_asks_for_nothing(commands: list[list[str]]) -> None:
    backend.KERNELS.mkdir()
    (backend.KERNELS / "manifest.json").write_text("{}")
    backend.build_wheel("dist", {"archs": "none"})
    assert not commands and not backend.KERNELS.exists()
    needed = backend.get_requires_for_build_wheel({"archs": "none"})
    assert not [name for name in needed if "cutlass" in name]
    needed = backend.get_requires_for_build_wheel({"archs": "sm_90a"})
    assert [name for name in needed if "cutlass" in name]


def test_a_wrong_choice_fails_early(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"archs='sm_80': one of all, none, sm_90a, sm_100f"):
        backend.build_wheel("dist", {"archs": "sm_80"})
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):
        backend.build_wheel("dist", {"archs": "all"})
    assert not commands
