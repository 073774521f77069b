"""Tests the choice between the design of one CTA and that of pairs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.day_one import both_designs
from benchmarks.day_one.outcome import Finding, Verdict
from fa4_jax import api, catalogue, designs
from fa4_jax.conformance.cases import Case
from fa4_jax.key import Pass
from fa4_jax.plan import kernel_keys
from fa4_jax.support import explain, supports
from tests.fakes import fake_target

BLACKWELL = "sm_100f"
OPERAND = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)


def test_both_designs_are_in_the_catalogue():
    keys = set(catalogue.all_keys())
    for arch, kernel, d, value in designs.CHOSEN:
        of_tiles = [
            k
            for k in keys
            if (k.arch, k.kernel, k.head_dim, k.value_dim) == (arch, kernel, d, value)
        ]
        plain = [k for k in of_tiles if not (k.ranges or k.bias or k.paged)]
        assert sum(k.pair for k in plain) * 2 == len(plain) > 0
        # With a bias, and for pages, the chosen design alone is built.
        alone = [k for k in of_tiles if k.bias or k.paged]
        assert {k.pair for k in alone} == {designs.is_pair(arch, kernel, (d, value), None)}
    assert {
        (k.arch, k.kernel, k.head_dim, k.value_dim)
        for k in keys
        if k.pair and k.kernel in (Pass.FORWARD, Pass.BACKWARD)
    } == set(designs.CHOSEN)


@pytest.mark.parametrize("design", [None, *designs.DESIGNS])
def test_keys_follow_the_design_that_is_asked_for(design: str | None):
    for arch, kernel, d, value in designs.CHOSEN:
        case = Case(head_dim=d, value_dim=None if value == d else value)
        forward, backward = kernel_keys(case.problem, arch, design=design)
        key = next(k for k in forward + backward if k.kernel == kernel)
        assert key.pair == ((design or designs.CHOSEN[arch, kernel, d, value]) == designs.PAIR)
        assert key in set(catalogue.all_keys())
    assert not any(
        k.pair for keys in kernel_keys(Case().problem, "sm_90a", design=design) for k in keys
    )


def test_asking_and_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert designs.asked() is None
    monkeypatch.setenv(designs.VARIABLE, "pair")
    assert designs.asked() == "pair"
    with designs.asking("single"):
        assert designs.asked() == "single"
    monkeypatch.setenv(designs.VARIABLE, "triple")
    with pytest.raises(
        ValueError, match="FA4_JAX_DESIGN must be one of single, pair, tall, short, not 'triple'"
    ):
        supports(OPERAND, OPERAND, OPERAND)
    with (
        pytest.raises(
            ValueError, match="design must be one of single, pair, tall, short, not 'triple'"
        ),
        designs.asking("triple"),
    ):
        pass


def test_explain_names_the_design(monkeypatch: pytest.MonkeyPatch):
    keys = tuple(catalogue.keys(BLACKWELL))
    target = dataclasses.replace(fake_target(keys), arch=BLACKWELL)
    monkeypatch.setattr(api, "named_target", lambda _: target)
    for design in designs.DESIGNS:
        with designs.asking(design):
            found = explain(OPERAND, OPERAND, OPERAND, arch=BLACKWELL)
        (forward,) = found.forward
        assert forward.endswith("_pair") == (design == "pair")
        assert found.designs[forward] == design and f"{forward}  {design}  m=" in str(found)


def test_a_first_day_names_the_line_to_change():
    chosen = designs.CHOSEN[BLACKWELL, Pass.FORWARD, 128, 128]
    other = next(x for x in designs.DESIGNS if x != chosen)
    cases = [
        case
        for case in both_designs.cells(BLACKWELL)
        if case.head_dim == 128 and case.value_dim is None
    ]
    assert len(cases) == 2 * len(both_designs.LENGTHS)

    def lines(ratio: float) -> list[str]:
        rates = {"forward": {chosen: 1000.0, other: 1000.0 * ratio}}
        found = [
            Finding("designs", case.id, Verdict.MEASURED, data={"tflops": rates}) for case in cases
        ]
        return both_designs.changes(found, BLACKWELL)

    assert not lines(1.0) and not lines(0.9)
    (line,) = lines(1.1)
    assert f"('sm_100f', Pass.FORWARD, 128, 128): {chosen.upper()} -> {other.upper()}, 1.10" in line
    assert not both_designs.changes([], BLACKWELL) and not both_designs.cells("sm_90a")
