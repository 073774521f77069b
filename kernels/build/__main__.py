"""python -m kernels.build: compiles the key list to cubins and writes their manifest."""

from __future__ import annotations

import argparse
import fnmatch
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fa4_jax import catalogue
from fa4_jax.key import KernelKey
from kernels.build import cache, package, sample

ALL, NONE, HERE = "all", "none", "here"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    options = _parse(arguments)
    archs = architectures(options.arch)
    if not archs:
        if options.arch == NONE:
            package.remove()
        print(f"--arch {options.arch}: no kernels are built")
        return 0
    keys = [key for key in catalogue.all_keys() if key.arch in archs]
    wanted = _sample(keys) if options.sample else set(keys)
    selected = [key for key in keys if key in wanted and fnmatch.fnmatch(key.name, options.only)]
    if not selected:
        print(f"no key matches {options.only!r}; see --list", file=sys.stderr)
        return 2
    if options.list:
        print(*(key.name for key in selected), sep="\n")
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140)
    start = time.perf_counter()
    try:
        entries = _build(selected, options.jobs, console)
    except (package.KernelError, NotImplementedError) as error:
        console.print(f"[red]{error}")
        return 1
    if options.ptx is not None:
        package.package_ptx(entries, options.ptx)
    elif options.cubins is not None:
        package.package(entries, options.cubins)
    else:
        others = (cache.find(key) for key in keys if key not in set(selected))
        kept = [*entries, *(entry for entry in others if entry is not None)]
        package.package(kept, partial=len(kept) < len(keys))
    console.print(_table(entries))
    total = sum(len(entry.code) for entry in entries)
    console.print(
        f"{len(entries)} kernels, {total / 2**20:.1f} MB, {time.perf_counter() - start:.1f} s, "
        f"in {os.path.relpath(options.ptx or options.cubins or package.OUTPUT)}"
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.build", description=__doc__)
    parser.add_argument(
        "--only",
        default="*",
        metavar="GLOB",
        help='kernel names to build, e.g. "*_fwd_*"; others stay packaged if they are up to date',
    )
    parser.add_argument(
        "--arch",
        choices=(ALL, NONE, HERE, *catalogue.ARCHITECTURES),
        default=ALL,
        help=f"{ALL} of them, {NONE}, one, or that of the GPU that is {HERE} (if there is one); "
        "kernels of other architectures are not packaged",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="build what kernels/build/sample.py chooses, as `make test` does",
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="kernels compiled at a time"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--cubins",
        type=pathlib.Path,
        metavar="FOLDER",
        help="write the selected kernels' cubins and their manifest there instead, "
        "to be carried to another machine (FA4_JAX_KERNELS)",
    )
    instead.add_argument(
        "--ptx",
        type=pathlib.Path,
        metavar="FOLDER",
        help="write the selected kernels' PTX and its manifest there instead, for the emulator",
    )
    return parser.parse_args(arguments)


def _sample(keys: list[KernelKey]) -> set[KernelKey]:
    """Returns the sample, what goes with kernels that are packaged, too, and all of a GPU here.

    Tests that run on a GPU take all of its kernels.
    """
    kept, here = filter(cache.find, keys), architectures(HERE)
    found = sample.kernels() | {key for key in keys if key.arch in here}
    return found | sample.with_companions(kept)


def architectures(choice: str) -> tuple[str, ...]:
    """Returns the architectures of a choice: none where there is no GPU that kernels run on."""
    if choice == ALL:
        return catalogue.ARCHITECTURES
    found = {NONE: None, HERE: _architecture_here()}.get(choice, choice)
    return () if found is None else (found,)


def _architecture_here() -> str | None:
    """Returns the architecture of the first GPU that the NVIDIA driver lists, if there is one."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", "--id=0"]
    if shutil.which(query[0]) is None:
        return None
    answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return catalogue.architecture_of(int(answer.strip().replace(".", "")))


def _build(keys: list[KernelKey], jobs: int, console: Console) -> list[cache.Entry]:
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=len(keys))
        entries = []
        for entry in package.build(keys, jobs):
            entries.append(entry)
            progress.update(task, advance=1, description=entry.cubin.key.name)
    return entries


def _table(entries: list[cache.Entry]) -> Table:
    table = Table(box=None)
    table.add_column("kernel", no_wrap=True)
    for heading in ("registers", "spills", "threads", "smem KB", "cubin KB", "tile", "compiled s"):
        table.add_column(heading, justify="right")
    for entry in sorted(entries, key=lambda entry: entry.cubin.key):
        cubin = entry.cubin
        table.add_row(
            cubin.key.name,
            str(cubin.registers),
            str(cubin.spill_bytes),
            str(cubin.launch.block[0] * cubin.launch.block[1] * cubin.launch.block[2]),
            f"{cubin.launch.dynamic_smem_bytes / 1024:.1f}",
            f"{len(entry.code) / 1024:.1f}",
            " ".join(f"{name}={size}" for name, size in cubin.tile.items()),
            f"{entry.seconds:.1f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
