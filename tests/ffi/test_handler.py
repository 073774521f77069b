"""Tests the handler on a made-up kernel: what it packs, what it refuses, devices and threads."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from fa4_jax import runtime
from fa4_jax.manifest import Factor, Launch
from kernels.emulator import tensor_map
from tests.ffi import compiler, made_up, stand_in
from tests.ffi.made_up import LAUNCH
from tests.ffi.stand_in import Array, Outcome

MULTIPROCESSORS = 16  # the number of the device attribute
MAJOR, MINOR = stand_in.CAPABILITY_ATTRIBUTES

Run = Callable[..., Outcome]


@pytest.fixture
def run(stand_in_process: ProcessPoolExecutor) -> Run:
    """Runs stand_in.run in the process of the stand-in."""
    return lambda *arguments: stand_in_process.submit(stand_in.run, *arguments).result()


def test_packs_every_kind_of_parameter(run: Run, tmp_path: pathlib.Path) -> None:
    outcome = run(made_up.call(tmp_path))
    assert outcome.error == ""
    (launch,) = outcome.launches
    assert launch["grid"] == [3 * 3, 2, 1]
    assert launch["block"] == [384, 1, 1]
    assert launch["cluster"] == [2, 1, 1]
    assert launch["programmatic"] == 0
    assert launch["smem"] == 102_400
    params = [bytes.fromhex(text) for text in launch["params"]]
    x_map, padded_map = tensor_map.decode(params[0]), tensor_map.decode(params[3])
    at = outcome.addresses
    assert (x_map.address, x_map.sizes, x_map.byte_strides) == (at["x"], (72, 40), (144,))
    assert (x_map.dtype, x_map.box, x_map.swizzle_bytes) == ("bf16", (64, 16), 128)
    assert (padded_map.address, padded_map.sizes) == (at["padded"], (48,))
    assert (padded_map.dtype, padded_map.box, padded_map.swizzle_bytes) == ("f32", (8,), 0)
    assert struct.unpack("<QQ", params[1] + params[2]) == (at["y"], at["sums"])
    numbers = b"".join(params[4:])
    assert struct.unpack("<iiifi", numbers) == (72, 48, -7, 0.125, 132)


@pytest.mark.parametrize("steer", [(), [("fail", ("cuLaunchKernelEx", 700))]])
def test_host_memory_is_registered_for_the_launch(
    run: Run, tmp_path: pathlib.Path, steer: list[tuple[str, tuple[Any, ...]]]
) -> None:
    outcome = run(made_up.call(tmp_path), steer)
    events = [event["event"] for event in outcome.log]
    buffers = [event for event in outcome.log if event["event"] == "register"]
    freed = {event["address"] for event in outcome.log if event["event"] == "unregister"}
    launches = [] if steer else ["launch"]
    assert events[2:] == ["register"] * 5 + launches + ["unregister"] * 5
    assert freed == {buffer["address"] for buffer in buffers}
    # Results come first, then the operands that share no result's memory, which are read-only.
    sizes = [(buffer["bytes"], buffer["flags"]) for buffer in buffers]
    assert sizes == [(20, 0), (48 * 3 * 4, 0), (40 * 72 * 2, 0), (3 * 4 * 4, 8), (40 * 72 * 2, 8)]
    if not steer:
        addresses = [outcome.addresses[name] for name in ("sums", "padded", "y", "table", "x")]
        assert [buffer["address"] for buffer in buffers] == addresses


def test_empty_grid_launches_nothing(run: Run, tmp_path: pathlib.Path) -> None:
    operands = (Array("bf16", (0, 72)), *made_up.OPERANDS[1:])
    outcome = run(made_up.call(tmp_path, operands=operands))
    assert outcome.error == ""
    assert outcome.launches == []


@pytest.mark.parametrize(
    ("processors", "ctas", "blocks"),
    [(1, 1, 2), (4, 1, 4), (5, 1, 4), (132, 1, 9), (1, 3, 2), (2, 3, 6), (3, 3, 8), (4, 3, 9)],
)
def test_persistent_grid_is_capped(
    run: Run, tmp_path: pathlib.Path, processors: int, ctas: int, blocks: int
) -> None:
    record = made_up.cubin(tmp_path, launch=dataclasses.replace(LAUNCH, persistent=ctas))
    steer = [("set_attribute", (0, MULTIPROCESSORS, processors))]
    outcome = run(made_up.call(tmp_path, record), steer)
    (launch,) = outcome.launches
    assert launch["grid"] == [blocks, 2, 1]
    assert struct.unpack("<i", bytes.fromhex(launch["params"][-1])) == (processors,)


def zeroed(name: str) -> Launch:
    """Returns the launch where the result of a name is zeroed, too."""
    results = (dataclasses.replace(r, zeroed=r.name == name) for r in LAUNCH.results)
    return dataclasses.replace(LAUNCH, results=tuple(results))


def test_a_result_is_zeroed_before_the_launch(run: Run, tmp_path: pathlib.Path) -> None:
    outcome = run(made_up.call(tmp_path, made_up.cubin(tmp_path, launch=zeroed("padded"))))
    assert outcome.error == ""
    names = [event["event"] for event in outcome.log]
    assert names[names.index("memset") :] == ["memset", "launch"] + ["unregister"] * 5
    (memset,) = (event for event in outcome.log if event["event"] == "memset")
    assert memset["address"] == outcome.addresses["padded"]
    assert (memset["value"], memset["count"]) == (0, 48 * 3)
    assert memset["stream"] == outcome.launches[0]["stream"]


def test_an_empty_grid_zeroes_nothing(run: Run, tmp_path: pathlib.Path) -> None:
    record = made_up.cubin(tmp_path, launch=zeroed("padded"))
    operands = (Array("bf16", (0, 72)), *made_up.OPERANDS[1:])
    outcome = run(made_up.call(tmp_path, record, operands=operands))
    assert outcome.error == ""
    assert "memset" not in {event["event"] for event in outcome.log}


def test_what_cannot_be_zeroed_is_not_launched(run: Run, tmp_path: pathlib.Path) -> None:
    record = made_up.cubin(tmp_path, launch=zeroed("padded"))
    outcome = run(made_up.call(tmp_path, record), [("fail", ("cuMemsetD32Async", 700))])
    want = f"kernel {made_up.KEY.name}, result padded: cuMemsetD32Async failed"
    assert want in outcome.error
    assert outcome.launches == []


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1)])
def test_programmatic_launch(
    run: Run, tmp_path: pathlib.Path, cluster: tuple[int, int, int]
) -> None:
    launch = dataclasses.replace(LAUNCH, programmatic=True, cluster=cluster)
    (launched,) = run(made_up.call(tmp_path, made_up.cubin(tmp_path, launch=launch))).launches
    assert (launched["programmatic"], launched["cluster"]) == (1, list(cluster))


def test_kernels_are_launched_together(
    stand_in_process: ProcessPoolExecutor, tmp_path: pathlib.Path
) -> None:
    calls = made_up.calls_together(tmp_path)
    outcome = stand_in_process.submit(stand_in.run_together, calls).result()
    assert outcome.error == ""
    first, second = outcome.launches
    assert (first["grid"], first["programmatic"]) == ([9, 2, 1], 0)
    assert (second["grid"], second["programmatic"]) == ([7, 1, 1], 1)
    # The second kernel reads and overwrites the memory that the first one wrote.
    names = ("table", "y", "padded", "late", "z")
    params = struct.unpack("<5Q", b"".join(map(bytes.fromhex, second["params"])))
    assert dict(zip(names, params, strict=True)) == {n: outcome.addresses[n] for n in names}
    assert struct.unpack("<Q", bytes.fromhex(first["params"][1]))[0] == outcome.addresses["y"]


def test_what_fails_in_a_call_of_several_kernels(
    stand_in_process: ProcessPoolExecutor, tmp_path: pathlib.Path
) -> None:
    calls = made_up.calls_together(tmp_path)
    steer = [("fail", ("cuLaunchKernelEx", 700))]
    outcome = stand_in_process.submit(stand_in.run_together, calls, steer).result()
    assert f"kernel {made_up.KEY.name}: cuLaunchKernelEx failed" in outcome.error
    assert outcome.launches == []
    outcome = stand_in_process.submit(stand_in.run_together, calls * 3).result()
    assert f"{made_up.KEY.name}: is one too many: a call launches at most 4" in outcome.error


def test_unknown_kernel(run: Run, tmp_path: pathlib.Path) -> None:
    attributes = made_up.ATTRIBUTES | {"kernel": "sm_90a_no_such"}
    outcome = run(made_up.call(tmp_path, attributes=attributes))
    assert "kernel sm_90a_no_such is not in this installation" in outcome.error
    names = f"{made_up.KEY.name},sm_90a_none"
    outcome = run(made_up.call(tmp_path, attributes=made_up.ATTRIBUTES | {"kernel": names}))
    assert "kernel sm_90a_none is not in this installation" in outcome.error


def test_missing_file(run: Run, tmp_path: pathlib.Path) -> None:
    record = made_up.cubin(tmp_path, file="gone.cubin")
    error = run(made_up.call(tmp_path, record)).error
    assert made_up.KEY.name in error
    assert f"{tmp_path / 'gone.cubin'}: the file cannot be read" in error


def test_damaged_file(run: Run, tmp_path: pathlib.Path) -> None:
    record = made_up.cubin(tmp_path)
    (tmp_path / record.file).write_bytes(made_up.CODE[:-1])
    outcome = run(made_up.call(tmp_path, record))
    assert "the file is damaged or of another build" in outcome.error
    assert record.sha256 in outcome.error
    assert outcome.log == []


@pytest.mark.parametrize(("major", "minor"), [(8, 9), (10, 0), (12, 0)])
def test_device_of_another_architecture(
    run: Run, tmp_path: pathlib.Path, major: int, minor: int
) -> None:
    steer = [("set_attribute", (0, MAJOR, major)), ("set_attribute", (0, MINOR, minor))]
    outcome = run(made_up.call(tmp_path), steer)
    want = f"compiled for sm_90a, cannot run on device 0 of compute capability {major}.{minor}"
    assert want in outcome.error
    assert outcome.log == []


@pytest.mark.parametrize(("minor", "runs"), [(0, True), (3, True)])
def test_family_architecture(run: Run, tmp_path: pathlib.Path, minor: int, runs: bool) -> None:
    key = dataclasses.replace(made_up.KEY, arch="sm_100f")
    attributes = made_up.ATTRIBUTES | {"kernel": key.name}
    call = made_up.call(tmp_path, made_up.cubin(tmp_path, key=key), attributes=attributes)
    steer = [("set_attribute", (0, MAJOR, 10)), ("set_attribute", (0, MINOR, minor))]
    assert (run(call, steer).error == "") is runs


@pytest.mark.parametrize(
    "function",
    [
        "cuCtxGetDevice",
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelGetFunction",
        "cuKernelSetAttribute",
        "cuTensorMapEncodeTiled",
        "cuMemHostRegister_v2",
        "cuLaunchKernelEx",
    ],
)
def test_driver_error_names_call(run: Run, tmp_path: pathlib.Path, function: str) -> None:
    error = run(made_up.call(tmp_path), [("fail", (function, 700))]).error
    assert f"kernel {made_up.KEY.name}" in error
    assert function in error
    assert "failed with CUDA_ERROR_MOCK (as the test asked)" in error


def test_failure_to_load_is_not_remembered(
    stand_in_process: ProcessPoolExecutor, run: Run, tmp_path: pathlib.Path
) -> None:
    call = made_up.call(tmp_path)
    assert run(call, [("fail", ("cuLibraryLoadData", 2))]).error != ""
    again = stand_in_process.submit(stand_in.run_sequence, call, [0]).result()
    assert len(again.launches) == 1


RESULTS = (Array("bf16", (40, 72)), Array("f32", (48, 3)), Array("f32", (5,)))


def _with(array_index: int, array: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    return (*arrays[:array_index], array, *arrays[array_index + 1 :])


WRONG_BUFFERS = {
    "called with 3 operands and 4 results, takes 3 and 3": (
        made_up.OPERANDS,
        (*RESULTS, RESULTS[0]),
    ),
    "operand x: has type fp16, must be bf16": (
        _with(0, Array("fp16", (40, 72)), made_up.OPERANDS),
        RESULTS,
    ),
    "operand x: has 1 dimensions, must have at least 2": (
        _with(0, Array("bf16", (40,)), made_up.OPERANDS),
        RESULTS,
    ),
    "result padded: has type i32, must be f32": (
        made_up.OPERANDS,
        _with(1, Array("i32", (48, 3)), RESULTS),
    ),
    "result padded: axis 0 is 40, must be 48": (
        made_up.OPERANDS,
        _with(1, Array("f32", (40, 3)), RESULTS),
    ),
    "result y: has 3 dimensions, must have 2": (
        made_up.OPERANDS,
        _with(0, Array("bf16", (40, 72, 1)), RESULTS),
    ),
    "tensor map x_map over sizes (71, 40): cuTensorMapEncodeTiled failed": (
        _with(0, Array("bf16", (40, 71)), made_up.OPERANDS),
        _with(0, Array("bf16", (40, 71)), RESULTS),
    ),
    "tensor map x_map: a tensor map takes bf16, f16 or f32": (
        _with(0, Array("i32", (40, 72)), made_up.OPERANDS),
        RESULTS,
    ),
}


@pytest.mark.parametrize("message", WRONG_BUFFERS)
def test_wrong_buffers(run: Run, tmp_path: pathlib.Path, message: str) -> None:
    operands, results = WRONG_BUFFERS[message]
    outcome = run(made_up.call(tmp_path, operands=operands, results=results))
    assert f"kernel {made_up.KEY.name}" in outcome.error
    assert message in outcome.error
    assert outcome.launches == []


def test_result_must_alias_operand(run: Run, tmp_path: pathlib.Path) -> None:
    error = run(made_up.call(tmp_path, alias=False)).error
    assert "result sums: must share the memory of the operand of its name" in error


@pytest.mark.parametrize("value", [None, 1.5])
def test_wrong_attribute(run: Run, tmp_path: pathlib.Path, value: float | None) -> None:
    attributes = {name: v for name, v in made_up.ATTRIBUTES.items() if name != "window"}
    if value is not None:
        attributes["window"] = value
    outcome = run(made_up.call(tmp_path, attributes=attributes))
    assert f"kernel {made_up.KEY.name}, attribute window:" in outcome.error


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((Factor(constant=1 << 31),), "grid dimension 0 would be 2147483648"),
        ((Factor(), Factor(constant=-1)), "grid dimension 0 would be -1"),
    ],
)
def test_grid_out_of_range(
    run: Run, tmp_path: pathlib.Path, blocks: tuple[Factor, ...], message: str
) -> None:
    launch = dataclasses.replace(LAUNCH, grid=(blocks, (Factor(),), (Factor(),)))
    outcome = run(made_up.call(tmp_path, made_up.cubin(tmp_path, launch=launch)))
    assert message in outcome.error


def test_size_beyond_32_bits(run: Run, tmp_path: pathlib.Path) -> None:
    param = dataclasses.replace(LAUNCH.params[5], size=(Factor(constant=1 << 31),))
    launch = dataclasses.replace(LAUNCH, params=(*LAUNCH.params[:5], param, *LAUNCH.params[6:]))
    outcome = run(made_up.call(tmp_path, made_up.cubin(tmp_path, launch=launch)))
    assert "parameter padded_rows: 2147483648 does not fit in 32 bits" in outcome.error


def test_no_current_device(run: Run, tmp_path: pathlib.Path) -> None:
    assert "cuCtxGetDevice" in run(made_up.call(tmp_path), [("set_device", (-1,))]).error


def test_several_devices(stand_in_process: ProcessPoolExecutor, tmp_path: pathlib.Path) -> None:
    devices = [0, 3, 0, 1, 3, 1]
    call = made_up.call(tmp_path)
    outcome = stand_in_process.submit(stand_in.run_sequence, call, devices).result()
    assert outcome.error == ""
    assert [launch["device"] for launch in outcome.launches] == devices
    events = [event for event in outcome.log if event["event"] != "launch"]
    attributes = [(e["device"], e["value"]) for e in events if e["event"] == "attribute"]
    assert attributes == [(device, 102_400) for device in (0, 3, 1)]
    assert sum(event["event"] == "load" for event in events) == 1


def test_device_out_of_range(run: Run, tmp_path: pathlib.Path) -> None:
    assert "device ordinal 64" in run(made_up.call(tmp_path), [("set_device", (64,))]).error


def test_concurrent_calls(stand_in_process: ProcessPoolExecutor, tmp_path: pathlib.Path) -> None:
    threads, repeats = 8, 40
    record = made_up.cubin(tmp_path)
    rows = [16 * (i + 1) for i in range(threads)]
    calls = [
        made_up.call(tmp_path, record, operands=_with(0, Array("bf16", (n, 72)), made_up.OPERANDS))
        for n in rows
    ]
    outcome = stand_in_process.submit(stand_in.run_threads, calls, repeats).result()
    assert outcome.error == ""
    grids = [launch["grid"][0] for launch in outcome.launches]
    assert sorted(grids) == sorted([n // 16 * 3 for n in rows] * repeats)
    sizes = {
        (launch["grid"][0], tensor_map.decode(bytes.fromhex(launch["params"][0])).sizes[1])
        for launch in outcome.launches
    }
    assert sizes == {(n // 16 * 3, n) for n in rows}
    assert sum(event["event"] == "load" for event in outcome.log) == 1


def test_contradictory_record(
    stand_in_process: ProcessPoolExecutor, tmp_path: pathlib.Path
) -> None:
    record = made_up.cubin(tmp_path, launch=dataclasses.replace(LAUNCH, cluster=(0, 1, 1)))
    with pytest.raises(ValueError, match=f"{made_up.KEY.name}: a cluster dimension is 0"):
        stand_in_process.submit(stand_in.run, made_up.call(tmp_path, record)).result()


def test_only_32_bit_results_are_zeroed(
    stand_in_process: ProcessPoolExecutor, tmp_path: pathlib.Path
) -> None:
    record = made_up.cubin(tmp_path, launch=zeroed("y"))
    with pytest.raises(ValueError, match=f"{made_up.KEY.name}: a buffer to be zeroed is neither"):
        stand_in_process.submit(stand_in.run, made_up.call(tmp_path, record)).result()


def test_runtime_with_stand_in(stand_in_process: ProcessPoolExecutor) -> None:
    report = stand_in_process.submit(stand_in.runtime_report).result()
    assert report["arch"] == "sm_90a"
    assert report["why"] is None or "no kernels are installed" in report["why"]


def _unavailable(
    process: ProcessPoolExecutor, capability: tuple[int, int], cuda: int
) -> str | None:
    """Returns why a device of a compute capability, with a driver for a CUDA version, runs no
    kernel.
    """
    if runtime.manifest() is None:
        pytest.fail("this test needs the kernels: run `python -m kernels.build`")
    major, minor = capability
    steer = [
        ("set_attribute", (0, MAJOR, major)),
        ("set_attribute", (0, MINOR, minor)),
        ("set_cuda_version", (cuda,)),
    ]
    return process.submit(stand_in.runtime_report, steer).result()["why"]


@pytest.mark.parametrize(
    ("capability", "arch", "cuda", "text"),
    [
        ((10, 0), "sm_100f", 12080, "need one that supports CUDA 12.9, it supports CUDA 12.8"),
        ((10, 3), "sm_100f", 12080, "need one that supports CUDA 12.9, it supports CUDA 12.8"),
        ((9, 0), "sm_90a", 11080, "need one that supports CUDA 12.0, it supports CUDA 11.8"),
    ],
)
def test_driver_too_old(
    stand_in_process: ProcessPoolExecutor,
    capability: tuple[int, int],
    arch: str,
    cuda: int,
    text: str,
) -> None:
    why = _unavailable(stand_in_process, capability, cuda)
    assert why == f"the driver is too old: kernels for {arch} {text}"


@pytest.mark.parametrize(
    ("capability", "cuda"), [((9, 0), 12000), ((10, 0), 12090), ((10, 3), 13000)]
)
def test_driver_new_enough(
    stand_in_process: ProcessPoolExecutor, capability: tuple[int, int], cuda: int
) -> None:
    assert _unavailable(stand_in_process, capability, cuda) is None


@pytest.mark.parametrize("capability", [(8, 0), (11, 0), (12, 0), (12, 1)])
@pytest.mark.parametrize("cuda", [12080, 13000])
def test_other_gpu_is_told_apart_from_old_driver(
    stand_in_process: ProcessPoolExecutor, capability: tuple[int, int], cuda: int
) -> None:
    major, minor = capability
    want = (
        f"kernels need compute capability 9.0 or 10.x, JAX sees compute capability {major}.{minor}"
    )
    assert _unavailable(stand_in_process, capability, cuda) == want


def test_refused_cubin_names_the_driver(run: Run, tmp_path: pathlib.Path) -> None:
    steer = [("set_cuda_version", (12080,)), ("fail", ("cuLibraryLoadData", 209))]
    error = run(made_up.call(tmp_path), steer).error
    assert "cuLibraryLoadData of a driver for CUDA 12.8 failed with CUDA_ERROR_MOCK" in error


def test_missing_driver() -> None:
    program = "from fa4_jax import runtime; print(runtime.why_unavailable(), runtime.device_arch())"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        runtime.STAND_IN_VARIABLE: "/nowhere/libcuda.so",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        cwd=compiler.ROOT,
        check=True,
    )
    assert "None" in done.stdout
    if runtime.manifest() is not None:
        assert "/nowhere/libcuda.so" in done.stdout
