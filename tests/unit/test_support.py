"""Tests supports, explain, the support table, and the commands that print them."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import __main__ as command
from fa4_jax import catalogue, doctor, explain, runtime, support, supports, tail
from fa4_jax.conformance import selftest
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs, visible
from fa4_jax.conformance.runner import arguments
from fa4_jax.manifest import Manifest
from fa4_jax.problem import Problem
from tests.fakes import TILE, fake_manifest


def struct(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


Q, K = struct(2, 300, 4, 128), struct(2, 500, 2, 128)


def test_supports_by_the_key_list():
    assert supports(Q, K, K, arch="sm_90a", is_causal=True).reason is None
    assert str(supports(Q, K, K, arch="sm_90a")) == "supported"
    wide = [struct(2, 30, 2, 512)] * 3
    assert not supports(*wide, arch="sm_90a")
    assert "head_dim 512" in str(supports(*wide, arch="sm_90a"))
    assert "sm_70" in str(supports(Q, K, K, arch="sm_70"))
    with pytest.raises(ValueError, match="scale"):
        supports(Q, K, K, arch="sm_90a", scale=0)
    with pytest.raises(TypeError, match="dropout"):
        supports(Q, K, K, dropout=0.1)


def test_supports_here(kernels_present: None):
    assert supports(Q, K, K)
    assert supports(Q, K, K, key_value_seq_lengths=struct(2, dtype=jnp.int32))
    assert supports(Q, K, K, struct(1, 1, 300, 500))
    assert "bias: the kernels take" in str(supports(Q, K, K, struct(1, 1, 300, 1)))


def test_explain_kernels(kernels_present: None):
    told = explain(Q, K, K, is_causal=True, deterministic=True)
    assert told.forward == ("sm_90a_fwd_bf16_d128_band",)
    assert told.backward[1] == "sm_90a_bwd_bf16_d128_band_deterministic"
    assert told.tiles[told.forward[0]] == {"m": TILE}
    sizes = {w.name: w.num_bytes for w in told.workspaces}
    tiles = 2 * 4 * 5  # of 64 queries
    rows = tiles * 64
    assert sizes == {
        "lse_log2": rows * 4,
        "delta": rows * 4,
        "dq_acc": rows * 128 * 4,
        "dq_order": tiles * 4,
        "dq_ticket": 4,
        "tile_ticket": 4,
        **dict.fromkeys(
            ("k_repeated", "v_repeated", "dk_parts", "dv_parts"), 2 * 500 * 4 * 128 * 2
        ),
    }
    assert told.tangent == ("sm_90a_tangent_bf16_d128_band",) and told.tangent_reason is None
    assert told.tiles[told.tangent[0]] == {"m": TILE}
    assert told.hessian_reason is None and told.hessian == (
        *("sm_90a_hessian_q_bf16_d128_band", "sm_90a_hessian_kv_bf16_d128_band"),
    )
    named = (*told.forward, *told.backward, *told.tangent, *told.hessian)
    for text in (*named, "dq_acc", "GFLOP", "tangents", "Hessian-vector products: kernels"):
        assert text in str(told)
    assert explain(Q, K, K, implementation="xla").forward_reason == "implementation='xla'"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sinks": struct(4, dtype=jnp.float32)}, "sinks: no kernel computes tangents with them"),
        ({"logits_soft_cap": 3.0}, "logits_soft_cap: no kernel computes tangents with them"),
        (
            {"segment_ids": (struct(2, 300, dtype=jnp.int32), struct(2, 500, dtype=jnp.int32))},
            "mask",
        ),
    ],
)
def test_explain_why_the_default_path_computes_tangents(
    kernels_present: None, options: dict[str, Any], reason: str
):
    told = explain(Q, K, K, **options)
    assert told.forward and told.tangent == ()
    assert told.tangent_reason is not None and reason in told.tangent_reason
    assert told.hessian == () and told.hessian_reason == told.tangent_reason
    assert f"tangents and second derivatives: default path ({told.tangent_reason})" in str(told)


def test_explain_the_room_for_split_tiles(kernels_present: None):
    tiles = 2 * 2 * 4  # of 128 keys, of all KV heads
    sizes = {w.name: w.num_bytes for w in explain(Q, K, K).workspaces}
    assert sizes["tail_acc"] == tiles * 2 * 128 * 128 * 4
    assert sizes["tail_parts"] == tiles * 4
    many = struct(2, 30000, 2, 128)
    sizes = {w.name: w.num_bytes for w in explain(Q, many, many).workspaces}
    assert sizes["tail_acc"] == tail.MOST_TILES * 2 * 128 * 128 * 4
    for told in (explain(Q, K, K, is_causal=True), explain(Q, K, K, deterministic=True)):
        assert not {w.name for w in told.workspaces} & {"tail_acc", "tail_parts"}


def test_explain_the_counters_of_cleared_sections(kernels_present: None):
    sizes = {w.name: w.num_bytes for w in explain(Q, K, K, is_causal=True).workspaces}
    assert sizes["dq_cleared"] == 2 * 4 * 4  # Of a head of each batch entry.
    told = explain(Q, K, K, is_causal=True, deterministic=True)
    assert "dq_cleared" not in {w.name for w in told.workspaces}


def test_explain_the_default_path():
    told = explain(Q, K, K)
    assert told.forward == () and told.workspaces == ()
    assert told.forward_reason and told.forward_reason in str(told)
    assert told.tangent_reason == told.forward_reason
    assert told.forward_flops == 4 * 128 * 4 * 2 * 300 * 500
    assert told.backward_flops == 2.5 * told.forward_flops


@pytest.mark.parametrize(
    "case",
    [
        Case(query_length=30, key_length=50),
        Case(query_length=30, key_length=50, is_causal=True, query_offset=7),
        Case(query_length=30, key_length=50, window=(4, 9), query_offset=(-5, 30)),
        Case(query_length=30, key_length=50, is_causal=True, key_lengths=(0, 17)),
        Case(query_length=30, key_length=50, window=(None, 3), query_lengths=(30, 8)),
    ],
    ids=lambda case: case.id,
)
def test_visible_pairs_are_counted(case: Case):
    inputs = make_inputs(case, 0)
    told = explain(inputs.query, inputs.key, inputs.value, **arguments(case))
    assert told.forward_flops == 4 * case.head_dim * visible(case, None).sum()


def test_traced_lengths_count_as_the_whole():
    problem = Problem(2, 30, 50, 4, 4, 64, "bf16", 0.1, has_lengths=True)
    call = {"key_value_seq_lengths": struct(2, dtype=jnp.int32)}
    assert support.visible_pairs(problem, call) == 2 * 30 * 50


def test_the_table_names_every_tile_of_the_key_list():
    table = support.table()
    for key in catalogue.all_keys():
        assert any(key.arch in row and f" {key.head_dim}" in row for row in table.splitlines())
    for row in table.splitlines()[2:]:
        # Kernels of few rows read no masks of pairs and no bias; such calls take the ordinary one.
        few = " few rows " in row or " decode " in row
        # Those for tangents and what follows them read no ranges, masks, caps and biases.
        derivative = "| tangents |" in row or "| Hessian products |" in row
        assert row.split().count("no") == (4 if derivative else 2 * few)


def installed(directory: pathlib.Path) -> Manifest:
    """Writes a manifest of two kernels whose files exist."""
    keys = catalogue.all_keys()[:2]
    manifest = fake_manifest(keys)
    records = {}
    for key, cubin in manifest.cubins.items():
        (directory / cubin.file).write_bytes(key.name.encode())
        digest = hashlib.sha256(key.name.encode()).hexdigest()
        records[key] = dataclasses.replace(cubin, sha256=digest)
    return Manifest(records, {}, directory)


def test_doctor_verifies_every_kernel(tmp_path, monkeypatch, capsys):
    manifest = installed(tmp_path)
    monkeypatch.setattr(runtime, "manifest", lambda: manifest)
    assert command.main(["doctor"]) == 0
    assert "2 verified" in capsys.readouterr().out
    first, second = manifest.cubins.values()
    (tmp_path / first.file).write_bytes(b"something else")
    (tmp_path / second.file).unlink()
    assert command.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "0 verified" in printed
    assert f"PROBLEM: {first.key.name}: SHA-256" in printed
    assert f"PROBLEM: {second.key.name}" in printed and "is missing" in printed


def test_doctor_notices_another_package_of_our_name(monkeypatch):
    names = {"fa4_jax": [doctor.DISTRIBUTION, "fa4-jax"]}
    monkeypatch.setattr(doctor.importlib.metadata, "packages_distributions", lambda: names)
    assert any("PROBLEM: the distribution fa4-jax" in line for line in doctor.report())


def test_selftest_passes_and_repeats_a_seed(capsys):
    arguments = ["selftest", "--filter", "d8-", "--seed", "5", "--verbose"]
    assert command.main(arguments) == 0
    first = capsys.readouterr().out
    assert "passed" in first and "--seed 5" in first and "dq" in first


def test_selftest_fails_on_a_wrong_result(capsys, monkeypatch):
    true_case = selftest.run_case

    def wrong_case(*args):
        verdicts = true_case(*args)
        return [dataclasses.replace(verdicts[0], failure="error 1"), *verdicts[1:]]

    monkeypatch.setattr(selftest, "run_case", wrong_case)
    assert command.main(["selftest", "--filter", "d8-"]) == 1
    assert "output: error 1" in capsys.readouterr().out


def test_selftest_reports_an_exception_as_a_failure(capsys):
    assert command.main(["selftest", "--filter", "d8-", "--implementation", "kernel"]) == 1
    assert "NotImplementedError: implementation='kernel'" in capsys.readouterr().out


def test_selftest_lists_and_refuses_an_unknown_name(capsys):
    assert command.main(["selftest", "--list", "--filter", "poison"]) == 0
    assert all("poison" in line for line in capsys.readouterr().out.splitlines())
    assert command.main(["selftest", "--filter", "nothing is called this"]) == 1


def test_numpy_offsets_are_static():
    told = explain(Q, K, K, is_causal=True, query_offset=np.int32(200))
    assert told.forward_flops < explain(Q, K, K).forward_flops
