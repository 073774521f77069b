"""`python -m fa4_jax doctor`: what is installed, what was found, what would run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import jaxlib.version

import fa4_jax
from fa4_jax import catalogue, runtime
from fa4_jax.manifest import Cubin, Manifest
from fa4_jax.support import explain
from fa4_jax.target import current_target

DISTRIBUTION = "flash-attention-4-jax"


def _versions() -> Iterator[str]:
    yield f"Python {platform.python_version()}"
    yield f"JAX {jax.__version__}, jaxlib {jaxlib.version.__version__}"
    yield f"fa4_jax from {pathlib.Path(fa4_jax.__file__).parent}"
    names = importlib.metadata.packages_distributions().get("fa4_jax", [])
    for name in sorted(set(names) - {DISTRIBUTION}):
        yield f"PROBLEM: the distribution {name} also installs fa4_jax; uninstall one of the two"


def _driver() -> str:
    if runtime.has_stand_in():
        return _stand_in()
    version = pathlib.Path("/proc/driver/nvidia/version")
    if not version.exists():
        return "NVIDIA driver: none"
    return "NVIDIA driver: " + version.read_text().splitlines()[0].split(":", 1)[-1].strip()


def _stand_in() -> str:
    capability = runtime.compute_capability()
    device = "which has no device"
    if capability is not None:
        device = f"on its device of compute capability {capability / 10}"
    variable, path = runtime.STAND_IN_VARIABLE, os.environ[runtime.STAND_IN_VARIABLE]
    return f"{variable}: {path} stands in for the driver; kernels run on JAX's CPU, {device}"


def _devices() -> Iterator[str]:
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        suffix = f", compute capability {capability}" if capability else ""
        yield f"device {device.id}: {device.platform} {device.device_kind}{suffix}"


def damaged(cubin: Cubin, manifest: Manifest) -> str | None:
    """What is wrong with a kernel's file, or None if its SHA-256 is the manifest's."""
    path = manifest.directory / cubin.file
    if not path.exists():
        return f"{cubin.key.name}: {path} is missing"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != cubin.sha256:
        return f"{cubin.key.name}: SHA-256 of {path} is {digest}, the manifest says {cubin.sha256}"
    return None


def _kernels() -> Iterator[str]:
    manifest = runtime.manifest()
    if manifest is None:
        reason = runtime.why_no_kernels()
        yield f"PROBLEM: {reason}" if runtime.MANIFEST.exists() else f"kernels: none; {reason}"
        return
    broken = [text for c in manifest.cubins.values() if (text := damaged(c, manifest))]
    total = len(manifest.cubins)
    yield f"kernels: {total} in {manifest.directory}, {total - len(broken)} verified"
    yield from (f"PROBLEM: {text}" for text in broken)
    if missing := sorted(set(catalogue.all_keys()) - set(manifest.cubins)):
        yield f"not built: {len(missing)} of the key list, first {missing[0].name}"
    spilling = [c.key.name for c in manifest.cubins.values() if c.spill_bytes]
    yield from (f"PROBLEM: {name} spills registers" for name in spilling)


def report() -> list[str]:
    """The lines that `doctor` prints; those that begin with PROBLEM want attention."""
    lines = [*_versions(), _driver(), *_devices(), *_kernels()]
    target = current_target()
    lines.append(f"runs kernels: {target.arch or 'no: ' + target.unavailable}")
    operand = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)
    lines.append("attention of bf16[2, 4096, 16, 128], causal:")
    lines += [f"  {line}" for line in str(explain(*[operand] * 3, is_causal=True)).splitlines()]
    return lines


def main() -> int:
    """Prints the report; returns the exit status, 1 if there is a problem."""
    lines = report()
    print("\n".join(lines))
    return 1 if any(line.startswith("PROBLEM") for line in lines) else 0
