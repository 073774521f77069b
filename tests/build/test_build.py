"""The ahead-of-time build: its list, what it refuses, that it repeats, and what it packaged."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import multiprocessing
import pathlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from fa4_jax import catalogue, manifest, runtime
from fa4_jax.key import HESSIAN_PASSES, KernelKey, Pass

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("building takes CuTe-DSL, which is not here", allow_module_level=True)

from kernels import sources
from kernels.build import __main__ as command
from kernels.build import cache, compile, cubin_info, package, sample
from tests.build import remote


@pytest.fixture(scope="module")
def compiler_process() -> Iterator[ProcessPoolExecutor]:
    """A process that may import cutlass."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(compile.prepare_process, "sm_90a").result()
        yield pool


def test_key_list() -> None:
    keys = catalogue.all_keys()
    assert len({key.name for key in keys}) == len(keys)

    def counts(arch: str) -> dict[Pass, int]:
        mine = [key for key in keys if key.arch == arch]
        found = {kernel: sum(key.kernel is kernel for key in mine) for kernel in Pass}
        return {kernel: count for kernel, count in found.items() if count}

    # Two types and five head dims; the backward has (192, 128), too, and Hopper's forward. Pages
    # or not; tangents of a dense call and of a band; deterministic or not.
    both = {
        Pass.FORWARD_SPLIT: 2 * 5 * 2,
        Pass.FORWARD_JOIN: 2 * 5,
        Pass.TANGENT: 2 * 5 * 2,
        Pass.BACKWARD_PRE: 2 * 6 * 2,
        Pass.BACKWARD_POST: 2 * 6,
        Pass.BIAS_GRADIENT: 2 * 5,
    }
    # Dense, a band, ranges, ranges with a cap; at d = 64 and 96 a short tile for a band and for
    # ranges, which have no tall one at 96, at d = 64 a narrow one for either, and all three for
    # sinks; pages; a bias, with which gradients are deterministic.
    forward = 2 * (6 * 4 + 2 * 2 - 1 + 2 + 3 + 5 + 6)
    backward = 2 * 6 * (4 * 2 + 1)
    hessian = dict.fromkeys(HESSIAN_PASSES, 2 * 3 * 2)
    own = {Pass.FORWARD: forward, Pass.BACKWARD: backward, **hessian}
    assert counts("sm_90a") == {**own, **both}
    # Dense, a band, ranges; polynomials or not up to d = 128; pairs or not of two head dims. A bias
    # has none of these, and neither have pages.
    forward = 2 * (3 * (5 + 3 + 2 * 2) + 5 + 5)
    backward = 2 * (3 * (6 + 2) * 2 + 6)
    assert counts("sm_100f") == {Pass.FORWARD: forward, Pass.BACKWARD: backward, **both}


def test_installation_is_whole(request: pytest.FixtureRequest) -> None:
    """It has the sample, or with --full-cover all kernels, and nothing else."""
    installed = runtime.manifest()
    assert installed is not None, "run python -m kernels.build"
    everything = any(map(request.config.getoption, ("--full-cover", "--every-case")))
    wanted = set(catalogue.all_keys()) if everything else sample.kernels()
    missing = sorted(key.name for key in wanted - set(installed.cubins))
    assert not missing, "run python -m kernels.build"
    assert set(installed.cubins) <= set(catalogue.all_keys())
    for cubin in installed.cubins.values():
        code = (installed.directory / cubin.file).read_bytes()
        assert hashlib.sha256(code).hexdigest() == cubin.sha256, cubin.key.name
        info = cubin_info.read(code)[cubin.symbol]
        assert info.registers == cubin.registers
        assert (info.stack_bytes, info.local_accesses, cubin.spill_bytes) == (0, 0, 0)


def test_build_repeats_bit_for_bit(compiler_process: ProcessPoolExecutor) -> None:
    installed = runtime.manifest()
    assert installed is not None
    key = next(key for key in sorted(installed.cubins) if key.kernel is Pass.BACKWARD_POST)
    again = compiler_process.submit(remote.digest_of, key).result()
    assert again == installed.cubins[key].sha256


def test_spilling_kernel_is_refused(compiler_process: ProcessPoolExecutor) -> None:
    stack, accesses, spills = compiler_process.submit(remote.resources_of_spilling).result()
    assert stack > 0
    assert accesses > 0
    assert spills >= stack
    with pytest.raises(package.KernelError, match="spills"):
        compiler_process.submit(remote.compile_spilling).result()


def test_cubin_info(compiler_process: ProcessPoolExecutor) -> None:
    entry = compiler_process.submit(remote.compile_scale).result()
    info = cubin_info.read(entry.code)["sample_scale_0"]
    assert info.param_bytes == (128, 128, 8, 4, 4, 4, 4)
    assert info.block == (128, 1, 1)
    assert (info.stack_bytes, info.local_accesses) == (0, 0)
    with pytest.raises(ValueError, match="not a cubin"):
        cubin_info.read(b"something else")


def test_package_replaces_and_removes(
    compiler_process: ProcessPoolExecutor, tmp_path: pathlib.Path
) -> None:
    entry = compiler_process.submit(remote.compile_scale).result()
    (tmp_path / "old.cubin").write_bytes(b"")
    package.package([entry], tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {entry.cubin.file, "manifest.json"}
    before = (tmp_path / "manifest.json").read_bytes()
    package.package([entry], tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_package_of_ptx(compiler_process: ProcessPoolExecutor, tmp_path: pathlib.Path) -> None:
    entry = compiler_process.submit(remote.compile_scale).result()
    (tmp_path / "old.ptx").write_text("")
    package.package_ptx([entry], tmp_path)
    packaged = manifest.load(tmp_path / "manifest.json").cubins[entry.cubin.key]
    text = (tmp_path / packaged.file).read_bytes()
    assert text == entry.ptx.encode()
    assert f".entry {packaged.symbol}(".encode() in text
    assert packaged.sha256 == hashlib.sha256(text).hexdigest()
    same = dataclasses.replace(packaged, file=entry.cubin.file, sha256=entry.cubin.sha256)
    assert same == entry.cubin
    assert {file.name for file in tmp_path.iterdir()} == {packaged.file, "manifest.json"}


def test_cache_finds_what_it_stored(
    compiler_process: ProcessPoolExecutor,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "DIRECTORY", tmp_path)
    entry = compiler_process.submit(remote.compile_scale).result()
    assert cache.find(entry.cubin.key) is None
    cache.store(entry)
    assert cache.find(entry.cubin.key) == entry
    path = tmp_path / entry.cubin.key.name
    path.with_suffix(".cubin").write_bytes(entry.code[:-1])
    assert cache.find(entry.cubin.key) is None


@pytest.mark.parametrize(
    "name", ["sm90.forward", "sm90.backward", "sm100.forward", "sm100.backward"]
)
def test_kernels_are_compiled_from_little_of_the_library(name: str) -> None:
    """A change elsewhere in it leaves what was compiled as it is."""
    sources = cache.sources_of(f"kernels.{name}")
    assert {"kernels.common.ring", "kernels.description", "kernels.build.compile"} <= sources
    of_the_library = {source for source in sources if source.split(".")[0] == "fa4_jax"}
    assert of_the_library == {"fa4_jax.bands", "fa4_jax.key", "fa4_jax.manifest"}


@pytest.mark.parametrize("key", catalogue.all_keys(), ids=lambda key: key.name)
def test_every_kernel_is_compiled_again_when_its_tiles_change(key: KernelKey) -> None:
    """The pre kernels of both architectures share their code, and each has its own tile table."""
    package = {"sm_90a": "kernels.sm90", "sm_100f": "kernels.sm100"}[key.arch]
    tiles = f"{package}.tiles"
    if key.kernel in (Pass.FORWARD_SPLIT, Pass.FORWARD_JOIN):
        tiles = "kernels.common.split_description"
    if key.kernel is Pass.BIAS_GRADIENT:
        tiles = f"{package}.bias_gradient_description"
    assert tiles in cache.sources_of(sources.module(key))


def test_cache_passes_over_records_of_another_form(
    compiler_process: ProcessPoolExecutor,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "DIRECTORY", tmp_path)
    entry = compiler_process.submit(remote.compile_scale).result()
    cache.store(entry)
    path = (tmp_path / entry.cubin.key.name).with_suffix(".json")
    record = json.loads(path.read_text())
    record |= {"digest": "of other sources", "cubin": {}}
    path.write_text(json.dumps(record))
    assert cache.find(entry.cubin.key) is None


def test_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "sm_90a_fwd_bf16_d128*"]) == 0
    dense = "sm_90a_fwd_bf16_d128"
    ends = ("", "_bias", "_paged", "_ranges", "_ranges_soft_cap")
    listed = [dense, *(f"{dense}_band{x}" for x in ends)]
    assert capsys.readouterr().out.split() == listed
    assert command.main(["--only", "nothing*"]) == 2
    assert "nothing*" in capsys.readouterr().err


def test_some_cubins_are_written_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A folder for another machine has the selected kernels alone; the package stays as it is."""
    key = min(sample.kernels())
    entry = cache.find(key)
    assert entry is not None
    monkeypatch.setattr(package, "OUTPUT", tmp_path / "packaged")
    folder = tmp_path / "carried"
    assert command.main(["--only", key.name, "--cubins", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"manifest.json", f"{key.name}.cubin"}
    assert list(manifest.load(folder / "manifest.json").cubins) == [key]
    assert not package.OUTPUT.exists()


@pytest.mark.parametrize(
    ("answer", "archs"),
    [("9.0\n", ("sm_90a",)), ("10.3\n", ("sm_100f",)), ("8.9\n", ()), (None, ())],
)
def test_the_build_finds_the_gpu_at_hand(
    answer: str | None, archs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=answer or "")
    monkeypatch.setattr(command.shutil, "which", lambda name: answer and f"/bin/{name}")
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: done)
    assert command.architectures(command.HERE) == archs
    assert command.architectures(command.ALL) == catalogue.ARCHITECTURES
    assert command.architectures(command.NONE) == ()
