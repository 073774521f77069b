"""Builds kernels in parallel processes and packages them: cubins for GPUs, or PTX to emulate."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
import pathlib
from collections.abc import Iterable, Iterator

from fa4_jax import manifest
from fa4_jax.key import KernelKey
from fa4_jax.manifest import Cubin, Manifest
from kernels.build import cache, compile

OUTPUT = cache.REPOSITORY / "fa4_jax" / "_cubins"
PARTIAL = "partial"
"""A file beside a manifest that lacks kernels: no wheel takes what lies there (backend.py)."""


class KernelError(Exception):
    """A kernel that must not be shipped: it spills registers or its products are serialized."""


def build(keys: Iterable[KernelKey], jobs: int) -> Iterator[cache.Entry]:
    """Compiles what no earlier build left, `jobs` kernels at a time; yields each when it is there.

    Raises:
      KernelError: a kernel is not fit to be shipped.
    """
    missing: list[KernelKey] = []
    for key in keys:
        if (found := cache.find(key)) is not None:
            yield found
        else:
            missing.append(key)
    for arch in sorted({key.arch for key in missing}):
        yield from _compile_all([key for key in missing if key.arch == arch], jobs)


def _compile_all(keys: list[KernelKey], jobs: int) -> Iterator[cache.Entry]:
    pool = concurrent.futures.ProcessPoolExecutor(
        max_workers=min(jobs, len(keys)), mp_context=multiprocessing.get_context("spawn")
    )
    with pool:
        futures = [pool.submit(compile_one, key) for key in keys]
        try:
            for future in concurrent.futures.as_completed(futures):
                compiled = future.result()
                cache.store(compiled)
                yield compiled
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def compile_one(key: KernelKey) -> cache.Entry:
    """Compiles a kernel, in a process of its architecture.

    Raises:
      KernelError: it is not fit to be shipped.
    """
    return entry(compile.compile_kernel(key))


def entry(compiled: compile.Compiled) -> cache.Entry:
    """Returns what the cache keeps of a compiled kernel.

    Raises:
      KernelError: it is not fit to be shipped.
    """
    name = compiled.key.name
    if compiled.spill_bytes > 0:
        raise KernelError(f"{name} spills {compiled.spill_bytes} bytes of registers")
    if compiled.serialized:
        raise KernelError(f"{name}: ptxas serialized its warpgroup products")
    cubin = Cubin(
        key=compiled.key,
        launch=compiled.source.launch,
        symbol=compiled.info.symbol,
        file=f"{name}.cubin",
        sha256=hashlib.sha256(compiled.cubin).hexdigest(),
        registers=compiled.info.registers,
        spill_bytes=compiled.spill_bytes,
        tile=compiled.source.tile,
    )
    return cache.Entry(cubin, compiled.cubin, compiled.ptx, compiled.host, compiled.seconds)


def package(
    entries: Iterable[cache.Entry], output: pathlib.Path = OUTPUT, partial: bool = False
) -> None:
    """Writes the cubins and their manifest, and removes cubins that are not of this build.

    partial: whether kernels of their architectures are missing.
    """
    output.mkdir(parents=True, exist_ok=True)
    if partial:
        (output / PARTIAL).touch()
    by_key = {kernel.cubin.key: kernel for kernel in entries}
    for kernel in by_key.values():
        cache.replace(output / kernel.cubin.file, kernel.code)
    cubins = {key: kernel.cubin for key, kernel in by_key.items()}
    document = Manifest(cubins, cache.toolchain(), output)
    cache.replace(output / "manifest.json", manifest.dump(document).encode())
    _remove_others(output, "*.cubin", cubins.values())
    if not partial:
        (output / PARTIAL).unlink(missing_ok=True)


def remove(output: pathlib.Path = OUTPUT) -> None:
    """Removes the packaged cubins and their manifest; what was compiled stays in the cache."""
    (output / "manifest.json").unlink(missing_ok=True)
    (output / PARTIAL).unlink(missing_ok=True)
    _remove_others(output, "*.cubin", ())


def package_ptx(entries: Iterable[cache.Entry], output: pathlib.Path) -> None:
    """Writes the kernels' PTX and its manifest, which replace what was there.

    A driver that runs PTX itself loads them. The records are the cubins', but for the file and its
    SHA-256.
    """
    output.mkdir(parents=True, exist_ok=True)
    cubins = {}
    for kernel in entries:
        key, text = kernel.cubin.key, kernel.ptx.encode()
        digest = hashlib.sha256(text).hexdigest()
        cubins[key] = dataclasses.replace(kernel.cubin, file=f"{key.name}.ptx", sha256=digest)
        cache.replace(output / cubins[key].file, text)
    document = Manifest(cubins, cache.toolchain(), output)
    cache.replace(output / "manifest.json", manifest.dump(document).encode())
    _remove_others(output, "*.ptx", cubins.values())


def _remove_others(output: pathlib.Path, pattern: str, cubins: Iterable[Cubin]) -> None:
    current = {cubin.file for cubin in cubins}
    for file in output.glob(pattern):
        if file.name not in current:
            file.unlink()
