"""Compares the gradients of launches under some policies with the oracle's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, Inputs, oracle, ordinary
from kernels.emulator import Policy
from tests.emulator.attention import Attention


def check_gradients(
    launch: Attention, case: Case, inputs: Inputs, policies: Sequence[Policy]
) -> None:
    """Runs the launches under each policy; dQ, dK and dV must be right."""
    with np.errstate(all="ignore"):
        exact, judges = oracle(case, inputs), [ordinary(case, inputs, x) for x in REFERENCE_SHIFTS]
    for seed, policy in enumerate(policies):
        results = launch.run(policy, seed)
        for name in ("dq", "dk", "dv"):
            usual = [x[name] for x in judges]
            verdict = compare(name, case.dtype, results[name], exact[name], usual, False)
            assert verdict.failure is None, verdict
