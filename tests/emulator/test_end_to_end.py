"""fa4_jax.attention on JAX's CPU through the real FFI handler and the emulated GPU.

JAX -> plan -> ffi_call -> handler -> driver API -> the kernels' PTX on the emulator. About 50 s.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fa4_jax import parallel, runtime
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.oracle import names
from fa4_jax.key import KernelKey, Pass
from kernels.build import cache, package
from kernels.emulator.driver.driver import SETTINGS_VARIABLE, Driver, settings
from tests.emulator import emulated_gpu
from tests.emulator.processes import HOW, Gpu, process
from tests.ffi import compiler

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)


def case_of_list(name: str) -> Case:
    """A conformance case by its name."""
    return next(case for case in CASES if case.id == name)


SMALL = (
    Case(batch=1, heads=(2, 1), query_length=130, key_length=200),
    Case(
        batch=2,
        heads=(1, 1),
        query_length=100,
        key_length=190,
        is_causal=True,
        query_offset=(-40, 90),
        window=(60, None),
        deterministic=True,
    ),
    Case(
        dtype="fp16",
        head_dim=128,
        batch=2,
        heads=(2, 1),
        query_length=100,
        key_length=130,
        query_lengths=(70, 100),
        key_lengths=(0, 100),
        poison=True,
    ),
    case_of_list("bf16-d64-b2-h2-t127-s129-causal"),
    case_of_list("fp16-d64-b2-h2-t128-s128-causal-deterministic"),
    Case(
        head_dim=72,
        batch=1,
        heads=(1, 1),
        query_length=200,
        key_length=140,
        growing=True,
        numerics="exact",
    ),
    case_of_list("bf16-d256-b2-h2-t1-s1"),
    Case(
        batch=2,
        heads=(2, 1),
        query_length=130,
        key_length=200,
        query_lengths=(130, 77),
        window=(60, 0),
        query_offset=60,
        sinks=True,
        max_logit=True,
    ),
    Case(batch=1, heads=(4, 2), query_length=150, key_length=200, is_causal=True),
    Case(
        head_dim=128,
        batch=1,
        heads=(4, 1),
        query_length=130,
        key_length=190,
        is_causal=True,
        query_offset=50,
        deterministic=True,
    ),
    case_of_list("bf16-d64-b2-h16over1-t4-s391-causal-qoffset250_56-klengths254_60-poison"),
    Case(batch=2, heads=(2, 1), query_length=150, key_length=150, masks=("segments",), sinks=True),
    Case(batch=1, heads=(2, 1), query_length=130, key_length=150, is_causal=True, soft_cap=4.0),
    Case(
        head_dim=128,
        batch=1,
        heads=(2, 1),
        query_length=140,
        key_length=200,
        is_causal=True,
        query_offset=60,
        masks=("scattered",),
        deterministic=True,
    ),
)
"""The last with row masks, and two before those, split a group of query heads in the backward."""


@pytest.mark.parametrize(
    ("case", "how"),
    list(zip(SMALL, itertools.cycle(HOW), strict=False)),
    ids=lambda value: value.id if isinstance(value, Case) else "",
)
def test_conforms(gpu: Gpu, case: Case, how: str, seed: int) -> None:
    verdicts = gpu(emulated_gpu.verdicts, case, seed, how)
    assert [verdict.name for verdict in verdicts] == list(names(case))
    assert not [verdict for verdict in verdicts if verdict.failure]


FORWARD_ALONE = (
    Case(
        batch=1,
        heads=(2, 1),
        query_length=100,
        key_length=140,
        masks=("segments",),
        sinks=True,
        max_logit=True,
    ),
    Case(
        batch=2,
        heads=(6, 2),
        query_length=5,
        key_length=330,
        is_causal=True,
        query_offset=(325, 90),
        query_lengths=(5, 3),
        masks=("scattered",),
        soft_cap=8.0,
        sinks=True,
        max_logit=True,
    ),
)
"""What no backward takes."""


@pytest.mark.parametrize("case", FORWARD_ALONE, ids=lambda case: case.id)
def test_forward_conforms(gpu: Gpu, case: Case, seed: int) -> None:
    verdicts = gpu(emulated_gpu.verdicts, case, seed, HOW[seed % len(HOW)], False)
    assert [verdict.name for verdict in verdicts] == list(names(case))[:-4]
    assert not [verdict for verdict in verdicts if verdict.failure]


@pytest.mark.parametrize("arch", ["gpu", "blackwell"])
def test_deterministic_gradients_ignore_timing(
    request: pytest.FixtureRequest, arch: str, seed: int
) -> None:
    emulated: Gpu = request.getfixturevalue(arch)
    case = Case(batch=1, heads=(2, 1), query_length=130, key_length=200, deterministic=True)
    first, *others = (emulated(emulated_gpu.results, case, seed, how) for how in HOW[:3])
    for other, (name, value) in itertools.product(others, first.items()):
        assert np.array_equal(value, other[name]), name


def test_vmap(gpu: Gpu, seed: int) -> None:
    case = Case(
        batch=1, heads=(2, 1), query_length=70, key_length=100, is_causal=True, deterministic=True
    )
    together, apart = gpu(emulated_gpu.vmapped_and_looped, case, seed)
    for one, other in zip(together, apart, strict=True):
        assert one.shape == other.shape
        assert np.array_equal(one, other)


@pytest.mark.parametrize("scores", [{}, {"sinks": True, "soft_cap": 3.0, "max_logit": True}])
def test_vmap_of_short_queries_over_the_same_keys(
    gpu: Gpu, seed: int, scores: dict[str, Any]
) -> None:
    """The instances become heads of one group, which then fill two blocks of packed rows."""
    case = Case(batch=1, heads=(20, 2), query_length=2, key_length=300, is_causal=True, **scores)
    together, apart = gpu(emulated_gpu.vmapped_over_queries, case, 4, seed)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)


@pytest.fixture(scope="module")
def two_devices(variables: dict[str, str]) -> Iterator[Gpu]:
    """The same in a process where JAX has two devices."""
    flags = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=2"
    yield from process(variables | {"XLA_FLAGS": " ".join(flags)})


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"logits_soft_cap": 2.0}],
    ids=["causal", "cap"],
)
@pytest.mark.parametrize(
    "scheme",
    [parallel.Ring("seq"), parallel.AllGather("seq"), parallel.Ulysses("seq")],
    ids=lambda scheme: type(scheme).__name__,
)
def test_context_parallelism_counts_a_sink_once(
    two_devices: Gpu, scheme: Any, options: dict[str, Any]
) -> None:
    sinks = np.array([1.0, 2.0, -3.0, 4.0], np.float32)
    found = two_devices(emulated_gpu.on_two_devices, scheme, options | {"sinks": sinks})
    for (actual, expected), tolerance in zip(found, (2e-2, 1e-5, 1e-5), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_what_no_kernel_writes_is_nan(
    variables: dict[str, str], tmp_path: pathlib.Path, seed: int
) -> None:
    """Results do not start as what XLA's memory held, which might be the right numbers."""
    entry = cache.find(KernelKey("sm_90a", Pass.FORWARD, "bf16", 64))
    assert entry is not None
    store = re.compile(r"\n\s*cp\.async\.bulk\.tensor\.4d\.global\.shared::cta[^;]*;")
    assert len(store.findall(entry.ptx)) > 0
    package.package_ptx([dataclasses.replace(entry, ptx=store.sub("", entry.ptx))], tmp_path)
    case = Case(batch=1, heads=(1, 1), query_length=150, key_length=100)
    results = {}
    for call in process(variables | {runtime.KERNELS_VARIABLE: str(tmp_path)}):
        results = call(emulated_gpu.results, case, seed, "", False)
    assert np.isnan(results["output"].astype(np.float32)).all()
    assert not np.isnan(results["lse"]).any()


@pytest.mark.parametrize("zeroed", [True, False])
def test_tickets_count_from_zero(
    variables: dict[str, str], tmp_path: pathlib.Path, seed: int, zeroed: bool
) -> None:
    """The handler zeroes the counter: otherwise no CTA has more than its first tile."""
    entry = cache.find(KernelKey("sm_90a", Pass.FORWARD, "bf16", 64, band=True, narrow=True))
    assert entry is not None
    launch = entry.cubin.launch
    results = tuple(dataclasses.replace(r, zeroed=r.zeroed and zeroed) for r in launch.results)
    launch = dataclasses.replace(launch, results=results)
    other = dataclasses.replace(entry, cubin=dataclasses.replace(entry.cubin, launch=launch))
    package.package_ptx([other], tmp_path)
    case = Case(batch=1, heads=(1, 1), query_length=2 * 128 + 10, key_length=130, is_causal=True)
    made = {}
    for call in process(variables | {runtime.KERNELS_VARIABLE: str(tmp_path)}):
        made = call(emulated_gpu.results, case, seed, "multiprocessors=1", False)
    written = ~np.isnan(made["output"][0, :, 0, 0].astype(np.float32))
    # Three CTAs have the last three tiles of 64 rows first.
    assert written.tolist() == [row >= 128 or zeroed for row in range(case.query_length)]


def test_reports(gpu: Gpu, tmp_path: pathlib.Path, seed: int) -> None:
    case = Case(batch=1, heads=(2, 1), query_length=192, key_length=128)
    gpu(emulated_gpu.verdicts, case, seed, f"report={tmp_path / 'reports.jsonl'}", False)
    (line,) = (tmp_path / "reports.jsonl").read_text().splitlines()
    report = json.loads(line)
    assert report["kernel"] == "fa4_fwd_0"
    assert report["roles"]["all"]["quantities"]["mma_flops"] == 4 * 2 * 192 * 128 * 64


def test_threads(gpu: Gpu, seed: int) -> None:
    cases = [
        Case(batch=1, heads=(1, 1), query_length=t, key_length=s) for t, s in ((9, 130), (130, 9))
    ]
    for verdicts in gpu(emulated_gpu.from_threads, cases, seed):
        assert not [verdict for verdict in verdicts if verdict.failure]


def test_broken_rule_is_named(gpu: Gpu, tmp_path: pathlib.Path) -> None:
    """A forward that stores O before its proxy fence; the next call is well again."""
    case = Case(batch=1, heads=(1, 1), query_length=150, key_length=200)
    changes = {"fence.proxy.async": "// fence.proxy.async"}
    error, after = gpu(
        emulated_gpu.error_of_broken_kernel, case, changes, tmp_path, "multiprocessors=4"
    )
    for part in (
        "kernel sm_90a_fwd_bf16_d64",
        "cuLaunchKernelEx failed with CUDA_ERROR_LAUNCH_FAILED",
        "proxy-fence",
        "fa4_fwd_0, CTA (0, 0, 0), warp ",
        "PTX line ",
        "Policy(schedule='random'",
        "seed ",
    ):
        assert part in error
    assert not [verdict for verdict in after if verdict.failure]


X = np.arange(32, dtype=np.float32)
STORE = "st.global.b32 [%rd2], %r2;"


def test_copy(gpu: Gpu, tmp_path: pathlib.Path) -> None:
    assert np.array_equal(gpu(emulated_gpu.run_copy, X, STORE, tmp_path), X)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (
            "st.global.b32 [%rd2+4], %r2;",
            ("CUDA_ERROR_ILLEGAL_ADDRESS", "out-of-bounds", "warp 0, lane 31, PTX line 17"),
        ),
        (
            "ld.global.b32 %r3, [%rd1+-4];\n" + STORE,
            ("CUDA_ERROR_ILLEGAL_ADDRESS", "out-of-bounds", "warp 0, lane 0, PTX line 17"),
        ),
        ("st.global.b32 [%rd1], %r2;", ("read-only", "warp 0, PTX line 17: st.global.b32")),
        (
            "sub.s64 %rd2, %rd2, %rd3;\nst.global.b32 [%rd2+2], %r2;",
            ("CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned", "lane 0, PTX line 18"),
        ),
        ("bra HERE;", ("cuLibraryGetKernel failed with CUDA_ERROR_INVALID_PTX", "HERE")),
        ("dp4a.u32.u32 %r3, %r2, %r2, %r2;", ("CUDA_ERROR_INVALID_PTX", "not implemented: dp4a")),
    ],
)
def test_bad_access_is_named(
    gpu: Gpu, tmp_path: pathlib.Path, body: str, parts: tuple[str, ...]
) -> None:
    """Operands and results are bounded by their own bytes, although pointers carry no sizes."""
    error = gpu(emulated_gpu.run_copy, X, body, tmp_path)
    assert isinstance(error, str)
    for part in (*parts, "kernel sm_90a_fwd_bf16_d8"):
        assert part in error


def test_denormals_survive(gpu: Gpu, tmp_path: pathlib.Path) -> None:
    """XLA's threads flush denormal numbers; PTX without .ftz does not."""
    body = "mul.f32 %r3, %r2, 0f3F000000;\nst.global.b32 [%rd2], %r3;"
    x = np.full(32, np.finfo(np.float32).tiny)
    assert np.array_equal(gpu(emulated_gpu.run_copy, x, body, tmp_path), x / 2)


def test_image_for_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = emulated_gpu.COPY.format(body=STORE).encode()
    explained: list[bytes] = []
    driver = Driver(explained.append)
    assert driver.prepare(text, b"copy") == 0
    monkeypatch.setenv(SETTINGS_VARIABLE, "capability=10.0")
    assert driver.prepare(text, b"copy") == 209
    assert explained == [b"PTX for sm_90a, the emulated device has compute capability 10.0"]


def test_cubin_is_refused(gpu: Gpu) -> None:
    with_cubins = gpu(emulated_gpu.error_with_cubins)
    assert "CUDA_ERROR_INVALID_IMAGE" in with_cubins
    assert "python -m kernels.build --ptx" in with_cubins


def test_driver_refuses_what_a_driver_refuses(gpu: Gpu) -> None:
    assert gpu(emulated_gpu.driver_results) == {
        "unknown kernel": 218,
        "kernel": 0,
        "register": 0,
        "overlap": 712,
        "unregister": 0,
        "unregister again": 713,
        "attribute": 1,
        "device": 101,
        "shared memory": 1,  # more than 48 KiB, and no attribute allows it
    }


def test_device(gpu: Gpu) -> None:
    assert gpu(emulated_gpu.device, "") == ("sm_90a", None)
    assert gpu(emulated_gpu.device, "capability=10.0") == ("sm_100f", None)


def test_doctor_says_that_the_gpu_is_emulated(gpu: Gpu, variables: dict[str, str]) -> None:
    lines = gpu(emulated_gpu.doctor_report)
    library = variables[runtime.STAND_IN_VARIABLE]
    assert (
        f"FA4_JAX_LIBCUDA: {library} stands in for the driver; kernels run on JAX's CPU, on its "
        "device of compute capability 9.0"
    ) in lines


def test_settings() -> None:
    chosen = settings("capability=10.0 seed=7 schedule=starve races=0")
    assert (chosen.capability, chosen.seed) == ("10.0", 7)
    assert (chosen.policy.schedule, chosen.policy.races) == ("starve", False)
    for text in ("capability=8.9", "policy=1", "speed=9", "seed=many"):
        with pytest.raises(ValueError, match=text.split("=")[1]):
            settings(text)


def test_selftest(variables: dict[str, str]) -> None:
    """The documented command for the whole set, on three of its cases."""
    command = [sys.executable, "-m", "fa4_jax", "selftest", "--implementation", "kernel"]
    done = subprocess.run(
        [*command, "--filter=-b2-h2-t1-s1"],
        env=os.environ | variables,
        cwd=compiler.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 passed" in done.stdout
