"""`python -m fa4_jax.conformance`: the same as `python -m fa4_jax selftest`."""

import argparse
import sys

from fa4_jax.conformance import selftest

_parser = argparse.ArgumentParser(description=selftest.__doc__)
selftest.add_arguments(_parser)
sys.exit(selftest.main(_parser.parse_args()))
