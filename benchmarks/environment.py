"""Where the numbers were measured, and with what."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax


def answer(*command: str) -> str | None:
    """Returns the standard output of a program, or None where the program is missing or fails."""
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def environment() -> dict[str, Any]:
    """Returns date, versions, device and commit. It starts JAX's backends."""
    device = jax.devices()[0]
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "platform": jax.default_backend(),
        "runtime": device.client.platform_version,
        "driver": answer(*query) if jax.default_backend() == "gpu" else None,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "commit": answer("git", "rev-parse", "HEAD"),
    }


def clocks() -> str | None:
    """Returns clock, power and temperature of the first GPU now, in nvidia-smi's words."""
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return answer("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0")


def packages(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
