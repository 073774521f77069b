"""Measures unit rates and latencies of the first GPU for a timing model of attention kernels.

    python -m benchmarks.microbenchmarks --output FILE.json
    python -m benchmarks.microbenchmarks --only wgmma --output FILE.json   # names with this in them
    python -m benchmarks.microbenchmarks --list                            # needs no GPU

Small PTX programs (`benchmarks.micro`) count cycles with %clock64 in the kernel. The file has
`environment` and `measurements`, each of which has `name`, `unit`, `value` (the median over
launches), `low` and `high` (over launches), `threads`, `ctas` (0: one per multiprocessor); or
`error` instead of the values. After a program that hangs or faults the file holds what was measured
until then.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environment import answer, clocks
from benchmarks.micro import (
    arithmetic,
    barriers,
    clusters,
    copies,
    global_memory,
    grids,
    products,
    shared_memory,
)
from benchmarks.micro.program import Measurement

GROUPS = (*(arithmetic, shared_memory, barriers, clusters, products, copies, global_memory, grids),)
_LAUNCHES = 5
_WARM_UP = 30
"""The readings of the clock before it counts: about half a second of work."""


def measurements() -> list[Measurement]:
    """Returns all measurements."""
    return [measurement for group in GROUPS for measurement in group.measurements()]


def _environment() -> dict[str, Any]:
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {
        "date": datetime.date.today().isoformat(),
        "driver": answer(*query),
        "python": platform.python_version(),
        "commit": answer("git", "rev-parse", "HEAD"),
        "clocks_before": clocks(),
    }


def run(chosen: list[Measurement], launches: int, output: Path) -> dict[str, Any]:
    """Measures and writes the file. A program that hangs or faults ends the run with what there is.

    Raises:
      RuntimeError: there is no GPU.
    """
    from benchmarks.micro.device import Device

    start = time.monotonic()
    device = Device()
    environment = _environment() | device.describe()
    environment["sm_clock_mhz"] = [device.clock_mhz() for _ in range(_WARM_UP)][-1]
    document: dict[str, Any] = {"environment": environment, "measurements": []}

    def save() -> None:
        environment["clocks_after"] = clocks()
        environment["seconds"] = round(time.monotonic() - start, 1)
        output.write_text(json.dumps(document, indent=1) + "\n")

    for measurement in chosen:
        launch = measurement.launch
        record: dict[str, Any] = {"name": measurement.name, "unit": measurement.unit}
        document["measurements"].append(record)
        try:
            values = device.measure(measurement, launches)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
            save()
            print(f"{measurement.name}: {record['error']}", flush=True)
            if isinstance(error, ValueError):
                continue
            return document
        record |= {"value": statistics.median(values), "low": min(values), "high": max(values)}
        record |= {"threads": launch.threads, "ctas": launch.ctas}
    environment["sm_clock_mhz_after"] = device.clock_mhz()
    save()
    return document


def table(document: dict[str, Any]) -> Table:
    """Prints the document to a terminal."""
    environment = document["environment"]
    title = f"{environment['device']}, {environment['sm_clock_mhz']:.0f} MHz"
    found = Table("measurement", "value", "low", "high", "unit", title=title)
    for record in document["measurements"]:
        cells = [f"{record[key]:.2f}" if key in record else "-" for key in ("value", "low", "high")]
        found.add_row(record["name"], *cells, record.get("error", record["unit"]))
    return found


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and runs the measurements."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.microbenchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("microbenchmarks.json"))
    parser.add_argument("--only", action="append", metavar="TEXT", help="repeatable")
    parser.add_argument("--launches", type=int, default=_LAUNCHES, help=f"({_LAUNCHES})")
    parser.add_argument("--list", action="store_true", help="names, without measuring")
    options = parser.parse_args(argv)
    texts: list[str] = options.only or [""]
    chosen = [m for m in measurements() if any(text in m.name for text in texts)]
    if options.list:
        print("\n".join(f"{m.name} [{m.unit}]" for m in chosen))
        return
    document = run(chosen, options.launches, options.output)
    console = Console()
    console.print(table(document), soft_wrap=True)
    console.print(f"{options.output}: {document['environment']['seconds']} s")


if __name__ == "__main__":
    main()
