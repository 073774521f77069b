"""python -m fa4_jax {doctor, selftest}."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fa4_jax import doctor
from fa4_jax.conformance import selftest


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fa4_jax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, found and would run")
    selftest.add_arguments(
        commands.add_parser("selftest", help="the conformance cases on what is present")
    )
    args = parser.parse_args(arguments)
    return doctor.main() if args.command == "doctor" else selftest.main(args)


if __name__ == "__main__":
    sys.exit(main())
