"""python -m kernels.build.costs: what each capability of the kernels costs, as a Markdown table.

A kernel that has several capabilities counts in the row of each. Seconds are of one core that
compiles one kernel after another; a build divides them among its processes. Run it after
`python -m kernels.build`; docs/notes/packaging.md has its output.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import deflate

from fa4_jax import catalogue
from fa4_jax.key import HESSIAN_PASSES, KernelKey, Pass
from kernels.build import cache


@dataclasses.dataclass(frozen=True)
class Capability:
    """One row.

    Attributes:
      has: whether a kernel is there for it.
      sampled: what `make cover` runs of it on the emulator; `make test` runs a part of that.
      proof: the options of tests.emulator.kernel_conformance that run all of it.
    """

    name: str
    has: Callable[[KernelKey], bool]
    sampled: str
    proof: str


def _plain(key: KernelKey) -> bool:
    special = key.ranges or key.sinks or key.pair or key.short or key.paged or key.polynomial_exp2
    derivative = key.kernel in (Pass.TANGENT, *HESSIAN_PASSES)
    return not (special or _splits_keys(key) or derivative or _has_bias(key))


def _has_bias(key: KernelKey) -> bool:
    return key.bias or key.kernel is Pass.BIAS_GRADIENT


def _splits_keys(key: KernelKey) -> bool:
    return key.kernel in (Pass.FORWARD_SPLIT, Pass.FORWARD_JOIN)


CAPABILITIES = (
    Capability("all", lambda key: True, "", "--covering --seeds 20"),
    Capability(
        "dense calls and bands, one CTA or the only design",
        _plain,
        "test_kernels.py, test_blackwell.py, test_blackwell_backward.py: a few cases of each",
        "--seeds 20",
    ),
    Capability(
        "determinism",
        lambda key: key.deterministic,
        "the same, three orders of CTAs, bit by bit",
        '--only "*deterministic*"',
    ),
    Capability(
        "masks in memory, sinks, largest scores",
        lambda key: key.sinks or (key.ranges and not key.soft_cap),
        "test_row_ranges.py, test_pair_masks.py, test_logits.py: a cover",
        '--only "*ranges*", --only "*sinks*"',
    ),
    Capability(
        "biases and their gradients",
        _has_bias,
        "test_bias.py: a cover",
        '--only "*bias*"',
    ),
    Capability(
        "few query rows and pages",
        _splits_keys,
        "test_split.py, test_decode_end_to_end.py",
        '--only "*_fwd_split_*"',
    ),
    Capability(
        "many query rows and pages",
        lambda key: key.paged and not _splits_keys(key),
        "test_pages.py: a cover; test_decode_end_to_end.py",
        '--covering --seeds 20 --only "*_fwd_[bf][fp]16_*_paged*"',
    ),
    Capability(
        "tangents",
        lambda key: key.kernel is Pass.TANGENT,
        "test_tangents.py: a cover",
        '--only "*_tangent_*"',
    ),
    Capability(
        "Hessian-vector products (Hopper)",
        lambda key: key.kernel in HESSIAN_PASSES,
        "test_hessian.py: a cover",
        '--only "*_hessian_*"',
    ),
    Capability(
        "soft caps (Hopper; Blackwell's kernels with masks take them)",
        lambda key: key.soft_cap,
        "test_logits.py: a cover",
        '--only "*soft_cap*"',
    ),
    Capability(
        "a short tile at d = 64 (Hopper)",
        lambda key: key.short and not key.paged,
        "test_kernels.py: tickets; short cases of test_end_to_end.py",
        '--only "*short"',
    ),
    Capability(
        "polynomial exponentials (Blackwell)",
        lambda key: key.polynomial_exp2,
        "test_blackwell.py",
        '--only "*polynomial*"',
    ),
    Capability(
        "pairs of CTAs beside one CTA (Blackwell)",
        lambda key: key.pair,
        "test_blackwell_end_to_end.py: four of 48 combinations a run",
        '--only "*_pair"',
    ),
)


def row(capability: Capability) -> str:
    """Returns a line of the table.

    Raises:
      LookupError: a kernel is not built.
    """
    seconds, num_bytes, compressed_bytes, count = 0.0, 0, 0, 0
    for key in filter(capability.has, catalogue.all_keys()):
        entry = cache.find(key)
        if entry is None:
            raise LookupError(f"{key.name} is not built: run python -m kernels.build")
        seconds += entry.seconds
        num_bytes += len(entry.code)
        compressed_bytes += len(deflate.deflate_compress(entry.code, 12))
        count += 1
    cells = [capability.name, str(count), f"{seconds:.0f}", f"{num_bytes / 1e6:.1f}"]
    cells += [f"{compressed_bytes / 1e6:.1f}", capability.sampled, capability.proof]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Prints the table; returns 1 if a kernel is not built."""
    head = ("capability", "kernels", "compile, s", "cubins, MB", "in a wheel, MB")
    try:
        rows = [row(capability) for capability in CAPABILITIES]
    except LookupError as error:
        print(error, file=sys.stderr)
        return 1
    print("| " + " | ".join((*head, "`make cover` runs", "the full proof")) + " |")
    print("|---" * (len(head) + 2) + "|")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
