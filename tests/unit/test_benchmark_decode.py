"""What `benchmarks.decode` compares."""

import types

import jax.numpy as jnp

from benchmarks import decode
from benchmarks.shapes import Case
from benchmarks.timing import Protocol


def test_a_loop_is_compared_with_kernels_that_load_as_many_keys(monkeypatch):
    """A step of one length has as many keys as the loop's steps have on average."""
    case = Case("decode", 1, 1, 4 * decode.PAGE, (1, 1), 16, dtype="float32")
    calls = {}
    monkeypatch.setattr(decode, "plan_of", lambda *_: types.SimpleNamespace(parts=None))
    monkeypatch.setattr(decode, "interleave", lambda given, _: calls.update(given) or {})
    monkeypatch.setattr(
        decode, "decode", lambda query, *rest, **_: query + jnp.mean(rest[3].astype(query.dtype))
    )
    decode.show_steps(case, Protocol(1, 1e-9))

    def mean_length(name):
        return float(jnp.max(calls[name]()[0])) / decode.STEPS

    for name in ("loop", "counted", "in twos", "chain"):
        assert abs(mean_length(name) - mean_length("kernels")) < 1
