"""Tests `supports` and `explain` for `decode`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import api, attention, decode, explain, log, supports
from fa4_jax.conformance.oracle import visible
from fa4_jax.conformance.paged import PAGED_CASES, PagedCase, make_cache
from tests.fakes import TILE, fake_target

LONG = PagedCase(dtype="bf16", head_dim=128, heads=(8, 2), table_pages=400, lengths=(6400, 17, 0))


def arguments(case: PagedCase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments; all but lengths are types only."""
    cache = make_cache(case, 0)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache.arrays[:-1]]
    return (*types, cache.lengths), cache.options


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("case", PAGED_CASES, ids=lambda case: case.id)
def test_supports_by_the_key_list(case: PagedCase, arch: str):
    args, options = arguments(case)
    found = supports(*args, call=decode, arch=arch, **options)
    assert bool(found) == case.has_kernel, found


def test_supports_says_why_not():
    (query, key, _, *rest), _ = arguments(LONG)
    wide = jax.ShapeDtypeStruct((40, 1, 8, 128), jnp.bfloat16)
    narrow = jax.ShapeDtypeStruct((900, 16, 2, 128), jnp.float8_e4m3fn)
    table = jax.ShapeDtypeStruct((40, 2**14), jnp.int32)
    copies = supports(
        *(wide, narrow, narrow, table, np.zeros(40, np.int32)), call=decode, arch="sm_90a"
    )
    num_bytes = 40 * 2**14 * 16 * 2 * 256 * 2
    assert f"{num_bytes} bytes of keys and values side by side" in str(copies)
    for arrays, options, reason in (
        ((query, key, key), {"implementation": "xla"}, "implementation='xla'"),
        ((query, key, key), {"scale": jax.ShapeDtypeStruct((), jnp.float32)}, "scale"),
    ):
        for name in ("sm_90a", "sm_100f"):
            found = supports(*arrays, *rest, call=decode, arch=name, **options)
            assert reason in str(found)
    with pytest.raises(ValueError, match="page_table must be int32"):
        supports(query, key, key, np.zeros((3, 400)), rest[1], call=decode, arch="sm_90a")
    with pytest.raises(ValueError, match="call must be"):
        supports(query, key, key, call=print)
    with pytest.raises(TypeError, match="is_causal"):
        explain(query, key, key, *rest, call=decode, is_causal=True)


def test_explain_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "current_target", fake_target)
    args, options = arguments(LONG)
    told = explain(*args, call=decode, **options)
    split, join = told.forward
    assert (split, join) == ("sm_90a_fwd_split_bf16_d128_paged", "sm_90a_fwd_join_bf16_d128")
    assert told.tiles[split] == {"m": TILE}
    # 3 entries x 2 KV heads: parts fill 132 multiprocessors of two thread blocks each.
    assert told.splits > 1
    assert {w.name: w.num_bytes for w in told.workspaces} == {
        "o_parts": 3 * told.splits * 8 * 128 * 4,
        "lse_parts": 3 * told.splits * 8 * 4,
    }
    assert told.backward == () and told.backward_flops == 0
    assert "no derivative" in (told.backward_reason or "")
    text = str(told)
    for part in (split, join, f"divided into {told.splits} parts", "o_parts"):
        assert part in text
    assert told.tangent_reason == told.backward_reason
    assert "backward" not in text and "tangents" not in text


def test_explain_the_default_path(monkeypatch: pytest.MonkeyPatch):
    args, options = arguments(LONG)
    told = explain(*args, call=decode, **options)
    assert told.forward == () and told.splits == 1 and told.workspaces == ()
    assert told.forward_reason and told.forward_reason in str(told)
    declined = explain(*args, call=decode, implementation="xla", **options)
    assert declined.forward_reason == "implementation='xla'"
    monkeypatch.setattr(api, "current_target", fake_target)
    args, options = arguments(PagedCase(scales="PK"))
    assert "query dtype f32" in str(explain(*args, call=decode, **options))
    with pytest.raises(NotImplementedError, match="query dtype f32"):
        explain(*args, call=decode, implementation="kernel", **options)


@pytest.mark.parametrize(
    ("arch", "head_dim", "flags"),
    [
        ("sm_90a", 64, "band_short"),
        ("sm_90a", 128, "band"),
        ("sm_90a", 192, "band"),
        ("sm_100f", 64, "band_polynomial_exp2"),
        ("sm_100f", 192, "band"),
    ],
)
def test_chunks_of_prompts_are_read_in_pages(
    arch: str, head_dim: int, flags: str, monkeypatch: pytest.MonkeyPatch
):
    case = PagedCase(dtype="bf16", rows=40, head_dim=head_dim, window=20)
    args, options = arguments(case)
    # What `attention` asks for does not hold: one kernel of a tile alone reads pages.
    target = dataclasses.replace(fake_target(), arch=arch, fast_exp2=True, design="pair")
    monkeypatch.setattr(api, "current_target", lambda: target)
    told = explain(*args, call=decode, **options)
    assert told.forward == (f"{arch}_fwd_bf16_d{head_dim}_{flags}_paged",)
    names = {w.name for w in told.workspaces}
    assert names == ({"tile_ticket"} if arch == "sm_90a" else set())


@pytest.mark.parametrize(
    ("case", "kernels", "tokens", "reason"),
    [
        (
            PagedCase(dtype="bf16", rows=40, head_dim=64, sinks=True),
            ["sm_90a_fwd_bf16_d64_band_sinks_narrow"],
            80,
            "sinks and T * N / K = 80 rows: with those the kernels with pages take at most 64",
        ),
        (
            PagedCase(dtype="bf16", rows=40, head_dim=128, window=10, table_pages=9, soft_cap=3.0),
            ["sm_90a_fwd_bf16_d128_band_ranges_soft_cap"],
            80,  # The rows see 50 tokens together, which may begin at the end of a page.
            "logits_soft_cap and T * N / K = 80 rows: with those the kernels with pages take",
        ),
        (
            PagedCase(dtype="fp16", head_dim=128, scales="K", table_pages=40),
            ["sm_90a_fwd_split_fp16_d128", "sm_90a_fwd_join_fp16_d128"],
            640,
            "float8_e4m3fn pages",
        ),
        (
            PagedCase(dtype="bf16", head_dim=128, page=20, table_pages=40),
            ["sm_90a_fwd_split_bf16_d128", "sm_90a_fwd_join_bf16_d128"],
            800,
            "pages of 20 tokens: the kernels take multiples of 16, next 16 and 32",
        ),
    ],
    ids=["rows", "window", "float8", "page"],
)
def test_kernels_that_take_no_pages_get_copies(
    case: PagedCase,
    kernels: list[str],
    tokens: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """`explain` names the copies, and the log says once why there are any."""
    monkeypatch.setattr(api, "current_target", fake_target)
    args, options = arguments(case)
    told = explain(*args, call=decode, **options)
    assert list(told.forward) == kernels
    copied = {w.name: w.shape for w in told.workspaces if w.name.endswith("copied")}
    shape = case.batch, tokens, 2, case.head_dim
    assert copied == {"k_copied": shape, "v_copied": shape}
    log.warn_once.cache_clear()
    run = jax.jit(lambda *args: decode(*args, **options) + decode(*args, **options))
    run.trace(*args).lower(lowering_platforms=("cuda",))
    messages = [x.getMessage() for x in caplog.records if x.name == "fa4_jax"]
    assert len(messages) == 1
    assert messages[0].startswith(f"decode copies the pages for its kernels: {reason}")


@pytest.mark.parametrize(
    "case",
    [
        PagedCase(lengths=(500, 81, 0, 7)),
        PagedCase(rows=4, lengths=(70, 19, 3, 0), window=18),
        PagedCase(rows=4, lengths=(70, 19, 3, 4), query_lengths=(4, 1, 3, 0)),
    ],
    ids=lambda case: case.id,
)
def test_visible_pairs_are_counted(case: PagedCase):
    args, options = arguments(case)
    told = explain(*args, call=decode, **options)
    assert told.forward_flops == 4 * case.head_dim * visible(case.contiguous, None).sum()


def test_traced_lengths_count_as_full():
    args, options = arguments(PagedCase(rows=2))
    whole = explain(*args[:-1], np.full(3, 80), call=decode, **options)
    traced = explain(*args[:-1], jax.ShapeDtypeStruct((3,), jnp.int32), call=decode, **options)
    assert whole.forward_flops == traced.forward_flops > 0


def test_attention_is_the_call_that_is_meant():
    q = jax.ShapeDtypeStruct((2, 30, 4, 64), jnp.bfloat16)
    assert explain(q, q, q) == explain(q, q, q, call=attention)
