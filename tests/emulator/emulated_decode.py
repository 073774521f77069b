"""What test_decode_end_to_end runs in the process whose GPU is emulated."""

from __future__ import annotations

from fa4_jax.conformance.compare import Verdict
from fa4_jax.conformance.paged import PagedCase, run_paged_case
from tests.emulator.emulated_gpu import settings


def verdicts(case: PagedCase, seed: int, how: str) -> list[Verdict]:
    """Conformance of a case, by kernels alone."""
    with settings(how):
        return run_paged_case(case, seed, "kernel")
