"""Tests what the context-parallel benchmark computes from traces and from numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import parallel, parallel_report, parallel_trace
from benchmarks.parallel_trace import common, length, overlap, summarise, union


def test_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert common([(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 10)]) == [(1, 2), (3, 4), (5, 6), (8, 9)]
    assert length([(0, 4), (5, 6)]) == 5


def event(name: str, start: float, duration: float, pid: int = 1, tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "pid": pid, "tid": tid}


def meta(kind: str, name: str, pid: int = 1, tid: int = 7) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "args": {"name": name}, "pid": pid, "tid": tid}


EVENTS = [
    event("ncclDevKernel_SendRecv(...)", 0, 40),
    event("sm_90a_fwd_bf16_d128_band", 10, 50),
    event("MemcpyP2P", 50, 30),
    event("MemcpyD2D", 60, 100),
]


def test_hidden_and_exposed_transfers():
    found = overlap(EVENTS)
    assert found["transfers_us"] == 70
    assert found["kernels_us"] == 50
    assert found["hidden_us"] == 30 + 10
    assert found["exposed_us"] == 30
    assert found["span_us"] == 160


def test_traces_are_told_by_gpu():
    trace = {
        "traceEvents": [
            meta("process_name", "/device:GPU:0"),
            meta("thread_name", "Stream #7(Compute)"),
            meta("process_name", "/host:CPU", pid=9),
            meta("thread_name", "python", pid=9),
            *EVENTS,
            event("ncclDevKernel_AllGather", 0, 1000, pid=9),
        ]
    }
    found = summarise(trace)
    assert list(found["gpus"]) == ["/device:GPU:0"]
    assert found["hidden_share"] == 40 / 70
    assert found["events"]["MemcpyD2D"] == {"count": 1, "us": 100}
    with pytest.raises(ValueError, match="no events of GPU streams"):
        summarise({"traceEvents": []})


def test_report(tmp_path):
    case = parallel.Case(1024, (16, 2))
    assert case.id == "1k-h16over2-d128"
    assert case.flops == 3.5 * 4 * 16 * 128 * 1024 * 1025 / 2
    size = {"bytes_per_gpu": {"total": 2**30}}
    results = {
        parallel.ONE: {"median_s": 0.4, "efficiency": 1.0, "tflops_per_gpu": 500.0, **size},
        "ring": {"median_s": 0.11, "efficiency": 0.4 / 0.44, "tflops_per_gpu": 450.0, **size},
        "Ulysses": {"error": "ValueError: too few heads"},
    }
    traced = summarise(
        {
            "traceEvents": [
                meta("process_name", "/device:GPU:0"),
                meta("thread_name", "Stream #7(Compute)"),
                *EVENTS,
            ]
        }
    )
    run = {
        "environment": dict.fromkeys(("date", "jax", "driver", "commit", "device"), "x"),
        "devices": 4,
        "options": {},
        "cases": [{"id": case.id, "tokens": case.tokens, "results": results}],
        "profile": {"case": case.id, "schemes": {"ring": traced}},
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    text = parallel_report.write(path)
    assert "| 1k-h16over2-d128 | ring | 110.00 | 450 | 0.909 | 1.00 |" in text
    assert "| ring | 0.16 | 0.07 | 57.1% | 0.03 |" in text
    assert "ValueError: too few heads" in text
    assert (tmp_path / "run.png").stat().st_size > 1000
    assert (tmp_path / "run-timeline.png").stat().st_size > 1000


def test_options():
    found = parallel.parsed_options(["xla_gpu_x=true", "xla_gpu_y=3"])
    assert found == parallel.OPTIONS | {"xla_gpu_x": True, "xla_gpu_y": "3"}
    assert set(parallel.USUAL) < set(parallel.CONTENDERS)
    assert parallel_trace.TRANSFER.search("ncclDevKernel_SendRecv")
