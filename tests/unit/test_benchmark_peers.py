"""Peers get the operands and masks of the case: stand-ins with the signatures of the real packages
compute what ours computes.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import contenders, measure, peers, torch_peer
from benchmarks.shapes import Case
from benchmarks.timing import Protocol

PROTOCOL = Protocol(loops=1, burst_s=1e-4)
CASES = (
    Case("values", 1, 16, 16, (2, 2), 192, is_causal=True, dtype="float32", value_dim=128),
    Case("window", 2, 24, 24, (4, 2), 64, is_causal=True, dtype="float32", window=(5, 0)),
    Case("window", 1, 24, 24, (2, 2), 64, dtype="float32", window=(5, 3)),
    Case("lengths", 3, 16, 16, (2, 1), 64, is_causal=True, dtype="float32", lengths=(16, 5, 1)),
    Case("cross", 1, 8, 24, (2, 2), 64, is_causal=True, query_offset=16, dtype="float32"),
)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool, window: tuple[int, int]
) -> jax.Array:
    """Attention of [T, N, H] with masks aligned to the last key; a negative side has no limit."""
    rows, keys = query.shape[0], key.shape[0]
    key, value = (jnp.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    scores = jnp.einsum("tnh,snh->nts", query, key) / query.shape[2] ** 0.5
    distance = jnp.arange(keys)[None, :] - (jnp.arange(rows) + keys - rows)[:, None]
    left, right = window
    seen = jnp.full(distance.shape, True)
    seen &= (distance <= 0) if is_causal else True
    seen &= (distance >= -left) if left >= 0 else True
    seen &= (distance <= right) if right >= 0 else True
    weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf))
    return jnp.einsum("nts,snh->tnh", weights, value)


def batched(*operands: Any, is_causal: bool, window: tuple[int, int]) -> jax.Array:
    """The same of [B, T, N, H]."""
    return jax.vmap(functools.partial(attend, is_causal=is_causal, window=window))(*operands)


def by_parts(starts: Any, *operands: Any, is_causal: bool, window: tuple[int, int]) -> jax.Array:
    """The same within each part of [sum of lengths, N, H]."""
    bounds = np.asarray(starts).tolist()
    parts = [slice(*x) for x in itertools.pairwise(bounds)]
    alone = functools.partial(attend, is_causal=is_causal, window=window)
    return jnp.concatenate([alone(*(x[part] for x in operands)) for part in parts])


def flash_mha(query, key, value, softmax_scale=None, is_causal=False, window_size=(-1, -1)):
    assert softmax_scale is None and key.shape == value.shape
    return batched(query, key, value, is_causal=is_causal, window=window_size)


def flash_mha_varlen(
    query, key, value, cu_seqlens, max_seqlen, is_causal=False, window_size=(-1, -1)
):
    assert max_seqlen == np.diff(np.asarray(cu_seqlens)).max()
    return by_parts(cu_seqlens, query, key, value, is_causal=is_causal, window=window_size)


def flash_attention(
    q, k, v, *, segment_ids=None, sliding_window=None, scale=None, backward="ranged"
):
    assert scale is None and backward == ("fused" if q.shape[3] == v.shape[3] else "ranged")
    window = (-1 if sliding_window is None else sliding_window - 1, -1)
    if segment_ids is None:
        return batched(q, k, v, is_causal=True, window=window)
    assert q.shape[0] == 1 and segment_ids.shape == q.shape[:2]
    starts = [0, *(np.flatnonzero(np.diff(np.asarray(segment_ids)[0])) + 1), q.shape[1]]
    return by_parts(starts, q[0], k[0], v[0], is_causal=True, window=window)[None]


class Tensor:
    """As much of a tensor of PyTorch as flash-attn-4's contender uses."""

    def __init__(self, data: Any, vjp: Any = None) -> None:
        self.data, self.vjp, self.device = data, vjp, "device"

    def clone(self) -> Tensor:
        return Tensor(self.data)

    requires_grad_ = detach = contiguous = clone

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()


def fake_torch(calls: list[dict[str, Any]]) -> torch_peer.Modules:
    """PyTorch and flash-attn-4; `calls` receives the options of each call of the latter."""

    def of(function, *operands, causal, window_size, **options):
        calls.append(options)
        window = tuple(-1 if x is None else x for x in window_size)
        function = functools.partial(function, is_causal=causal, window=window)
        output, vjp = jax.vjp(function, *(x.data for x in operands))
        return Tensor(output, vjp), None

    def varlen(*operands, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        assert cu_seqlens_q == cu_seqlens_k and max_seqlen_q == max_seqlen_k
        return of(functools.partial(by_parts, cu_seqlens_q), *operands, **options)

    torch = types.SimpleNamespace(
        from_dlpack=Tensor,
        tensor=lambda data, dtype, device: data,
        int32="int32",
        no_grad=lambda: jax.disable_jit(False),  # Any context.
        cuda=types.SimpleNamespace(synchronize=lambda: None),
        autograd=types.SimpleNamespace(
            grad=lambda output, operands, cotangent, retain_graph: [
                Tensor(x) for x in output.vjp(cotangent.data)
            ]
        ),
    )
    flash = types.SimpleNamespace(
        flash_attn_func=functools.partial(of, batched), flash_attn_varlen_func=varlen
    )
    return torch_peer.Modules(torch, flash)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Installs the stand-ins; returns the options of flash-attn-4's calls."""
    dew = types.SimpleNamespace(flash_mha=flash_mha, flash_mha_varlen=flash_mha_varlen)
    jla = types.SimpleNamespace(flash_attention=flash_attention)
    for name in ("jla", "jla.ops", "jla.ops.mosaic_gpu"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "jla.ops.mosaic_gpu.attention", jla)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "dew_flash_attn", dew)  # type: ignore[arg-type]
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(torch_peer, "load", lambda: fake_torch(found))

    def stand_ins(case: Case, platform: str):
        ours = peers.contenders(case, "cpu")[0][:1]
        others, absent = peers.contenders(case, "gpu")
        names = (peers.FA3, peers.FA4, peers.FA4_DETERMINISTIC, peers.JLA)
        return [*ours, *(x for x in others if x.name in names)], absent

    monkeypatch.setattr(measure, "contenders", stand_ins)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_peers_compute_the_case(case: Case, calls: list[dict[str, Any]]):
    record = measure.measure(case, PROTOCOL)
    expected = {peers.FA4}
    expected |= {peers.FA3} if case.value_dim is None else set()
    expected |= {peers.JLA} if case.is_causal and not case.query_offset else set()
    for direction in measure.DIRECTIONS:
        results = record[direction]["results"]
        assert expected == {x for x in peers.PEERS if "tflops" in results.get(x, {})}
        assert max(results[x]["difference"] for x in expected) < 1e-4
    deterministic = record["backward"]["results"][peers.FA4_DETERMINISTIC]
    assert deterministic["difference"] < 1e-4 and deterministic["tflops"] > 0
    assert peers.FA4_DETERMINISTIC not in record["forward"]["results"]
    assert {x["deterministic"] for x in calls} == {False, True}


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=lambda case: case.id)
def test_a_wrong_mask_is_seen(case: Case, calls: list[dict[str, Any]], monkeypatch):
    """Without a difference here the test above could not fail."""
    of_case = measure.contenders

    def with_a_wrong_mask(_: Case, platform: str):
        (ours, *others), absent = of_case(case, platform)
        attend: Any = ours.attend
        wrong = functools.partial(attend, local_window_size=(3, 0))
        return [contenders.Contender(peers.OURS, wrong), *others], absent

    monkeypatch.setattr(measure, "contenders", with_a_wrong_mask)
    record = measure.measure(case, PROTOCOL)
    for direction in measure.DIRECTIONS:
        for name in (peers.FA3, peers.FA4, peers.JLA):
            assert record[direction]["results"][name]["difference"] > 0.03


def test_peers_say_why_they_are_absent():
    offset = Case("cross", 1, 16, 32, (1, 1), 64, is_causal=True, query_offset=8)
    present, absent = peers.contenders(offset, "gpu")
    assert [x.name for x in present] == [peers.OURS, peers.DETERMINISTIC]
    assert {x.name: x.reason for x in absent} == {
        peers.CUDNN: "it has no query offset",
        peers.FA3: "its masks are aligned to the last key",
        peers.FA4: "its masks are aligned to the last key",
        peers.JLA: "it has no query offset",
        peers.PALLAS: "its shared memory is float16, whatever the operands are",
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"value_dim": 32}, "it needs value's head dim to be query's"),
        ({"window": (3, 0), "is_causal": True}, "it has no windows"),
        ({"lengths": (4,)}, "it has no lengths of batch entries"),
    ],
)
def test_pallas_says_what_it_cannot_do(fields: dict[str, Any], reason: str):
    case = Case("fp16", 1, 16, 16, (1, 1), 64, dtype="float16", **fields)
    _, absent = peers.contenders(case, "gpu")
    assert {x.name: x.reason for x in absent}[peers.PALLAS] == reason


def test_peers_that_are_not_installed_are_absent(monkeypatch: pytest.MonkeyPatch):
    for name in ("dew_flash_attn", "jla.ops.mosaic_gpu.attention", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)
    torch_peer.load.cache_clear()
    case = Case("grid", 1, 16, 16, (1, 1), 64, is_causal=True)
    _, absent = peers.contenders(case, "gpu")
    torch_peer.load.cache_clear()
    reasons = {x.name: x.reason for x in absent}
    for name in (peers.FA3, peers.FA4, peers.JLA):
        assert reasons[name].startswith("cannot be imported")


def test_without_a_peer_the_share_of_the_dense_rate_is_measured():
    offset = Case("cross", 1, 16, 32, (1, 1), 8, is_causal=True, query_offset=8, dtype="float32")
    record = measure.measure(offset, PROTOCOL)
    for direction in measure.DIRECTIONS:
        assert record[direction]["share_of_dense"] > 0
    square = Case("grid", 1, 16, 16, (1, 1), 8, is_causal=True, dtype="float32")
    assert "share_of_dense" not in measure.measure(square, PROTOCOL)["forward"]


def test_importing_the_benchmarks_imports_no_pytorch():
    program = "import sys, benchmarks.attention; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
