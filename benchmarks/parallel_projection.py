"""Prints what `fa4_jax.parallel.choose` expects of more GPUs than were measured, as Markdown.

python -m benchmarks.parallel_projection
"""

from __future__ import annotations

from fa4_jax.parallel import Estimate, choose

HEADS = (64, 8)
HEAD_DIM = 128
TOKENS = (128 * 1024, 1024 * 1024, 8 * 1024 * 1024)
DEVICES = (64, 512)
PER_HOST = 8


def cell(x: Estimate) -> str:
    """Returns efficiency and memory, or says that the scheme does not apply."""
    if x.scheme is None:
        return "not possible"
    return f"{x.efficiency:.2f}, {x.memory_bytes / 2**30:.1f} GiB"


def table() -> str:
    """Returns a table with a row for each number of GPUs and tokens; its time is the fastest
    scheme's.
    """
    schemes = ("ring", "all-gather", "Ulysses", "ring x Ulysses 8")
    lines = [
        f"| GPUs | tokens | {' | '.join(schemes)} | fastest, ms |",
        "|---" * (len(schemes) + 3) + "|",
    ]
    n, k = HEADS
    for devices in DEVICES:
        for tokens in TOKENS:
            found = choose(
                tokens=tokens,
                query_heads=n,
                kv_heads=k,
                head_dim=HEAD_DIM,
                devices=devices,
                devices_per_host=PER_HOST,
                is_causal=True,
            )
            by_name = {
                x.name.replace(f"ring {devices // PER_HOST} x", "ring x"): x
                for x in found.estimates
            }
            cells = " | ".join(cell(by_name[name]) for name in schemes)
            size = f"{tokens // 1024}k" if tokens < 1 << 20 else f"{tokens >> 20}M"
            best = f"{1e3 * found.estimates[0].total_s:.0f}"
            lines.append(f"| {devices} | {size} | {cells} | {best} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
