"""`python -m benchmarks.day_one.probe` prints whether the GPU works and what it is, as JSON."""

from __future__ import annotations

import json
import sys

from benchmarks.day_one.gpu import Gpu, works


def main() -> int:
    """Runs a tiny kernel and prints what the GPU is; returns 1 if the words are wrong."""
    gpu = Gpu()
    right = works(gpu)
    print(json.dumps(gpu.describe() | {"works": right}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
