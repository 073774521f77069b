"""The house's rules hold, but for what is listed here with its reason."""

from __future__ import annotations

import collections

from tests import house

ALLOWED = {
    # Most of it is the signature and what its arguments mean.
    "lines of a function": {
        "fa4_jax/api.py: attention",
        "fa4_jax/parallel/sharded.py: attention",
    },
    # Signatures that users call: arguments of jax.nn.dot_product_attention, and of other packages.
    "parameters": {
        "fa4_jax/api.py: attention",
        "fa4_jax/flax.py: attention_fn",
        "fa4_jax/integrations/equinox.py: __call__",
        "fa4_jax/integrations/levanter.py: attention",
        "fa4_jax/integrations/maxtext.py: apply_attention",
        "fa4_jax/integrations/tokamax.py: _fwd",
        "fa4_jax/paged/cache.py: empty",
        "fa4_jax/paged/call.py: decode",
        "fa4_jax/parallel/cost.py: choose",
        "fa4_jax/parallel/decode.py: local_decode",
        "fa4_jax/parallel/local.py: local_attention",
        "fa4_jax/parallel/sharded.py: attention",
        # Host functions, and Hopper's forward, have a parameter for each dataclass of
        # kernels.interface.
        "kernels/common/bias_gradient_host.py: __call__",
        "kernels/common/hosts.py: __call__",
        "kernels/sm90/forward.py: kernel",
        "kernels/emulator/launch.py: launch",
        # Host functions of others' kernels, and of a kernel that tests the compiler.
        "tests/build/sample_kernels.py: __call__",
        "tests/emulator/interop/hosts.py: __call__",
    },
}


def test_rules_hold() -> None:
    beyond = collections.defaultdict[str, set[str]](set)
    for finding in house.findings():
        beyond[finding.rule].add(finding.place)
    assert beyond == ALLOWED


def test_a_cycle_and_a_long_function_are_found(monkeypatch) -> None:
    import ast

    long = "def f(a: tuple):\n" + "    x = 1\n" * house.MOST_FUNCTION_LINES
    files = {
        "kernels/a.py": ast.parse("from kernels import b\n" + long),
        "kernels/b.py": ast.parse("import kernels.a\n"),
    }
    monkeypatch.setattr(house, "modules", lambda: files)
    assert house.cycles() == [["kernels.a", "kernels.b"]]
    found = [f for path, function in house._functions() for f in house._of_function(path, function)]
    assert {f.rule for f in found} == {"lines of a function", "bare tuples and lists"}
