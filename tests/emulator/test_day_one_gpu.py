"""What the first day does with a GPU, on a stand-in for the driver's Python bindings.

Objects and enumerations are the bindings' own; kernels run on the emulator.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest

from benchmarks.day_one import gpu as gpu_module
from benchmarks.day_one.gpu import FAULT, HANG, TINY, Gpu, GpuError, Shape, works
from benchmarks.day_one.litmus import HOPPER, Kernel, Litmus, OnGpu, control, judge
from benchmarks.day_one.outcome import Verdict
from benchmarks.day_one.parts import programs
from kernels import emulator
from kernels.emulator import EmulationError, Policy
from kernels.emulator.ptx.parser import parse

try:
    REAL: Any = importlib.import_module("cuda.bindings.driver")
except ImportError:
    pytest.skip("there are no CUDA bindings", allow_module_level=True)

OK = REAL.CUresult.CUDA_SUCCESS


class Driver:
    """A driver with one Hopper of two multiprocessors."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.failure: Any = None
        self.programmatic: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(REAL, name)
        return lambda *_: (OK,)

    def cuDeviceGet(self, _: int) -> Any:
        return OK, 0

    def cuDevicePrimaryCtxRetain(self, _: Any) -> Any:
        return OK, 0

    def cuStreamCreate(self, _: int) -> Any:
        return OK, REAL.CUstream(0)

    def cuDeviceGetAttribute(self, attribute: Any, _: Any) -> Any:
        name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        return OK, {"COMPUTE_CAPABILITY_MAJOR": 9, "MULTIPROCESSOR_COUNT": 2}.get(name, 0)

    def cuDeviceGetName(self, _: int, __: Any) -> Any:
        return OK, b"Stand-in\0\0\0"

    def cuDriverGetVersion(self) -> Any:
        return OK, 13000

    def cuMemAlloc(self, size: int) -> Any:
        address = (1 << 20) * (1 + len(self.memory))
        self.memory[address] = np.zeros(size, np.uint8)
        return OK, address

    def cuMemcpyHtoD(self, address: int, data: np.ndarray, size: int) -> Any:
        self.memory[address][:size] = data.reshape(-1).view(np.uint8)
        return (OK,)

    def cuMemcpyDtoH(self, data: np.ndarray, address: int, size: int) -> Any:
        data.reshape(-1).view(np.uint8)[:] = self.memory[address][:size]
        return (OK,)

    def cuLibraryLoadData(self, image: bytes, *_: Any) -> Any:
        # The emulator has no family without features of its own.
        return OK, image.rstrip(b"\0").decode().replace(".target sm_90\n", ".target sm_90a\n")

    def cuLibraryGetKernel(self, text: str, name: bytes) -> Any:
        return OK, (text, name.decode())

    def cuKernelGetFunction(self, kernel: Any) -> Any:
        return OK, kernel

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, _: int) -> Any:
        text, name = function
        values, types = params
        assert len(values) == len(types)
        self.programmatic.append(
            any(x.value.programmaticStreamSerializationAllowed for x in config.attrs)
        )
        try:
            emulator.launch(
                text,
                name,
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                cluster=parse(text).kernels[name].cluster or (1, 1, 1),
                dynamic_smem=config.sharedMemBytes,
                params=[int(x).to_bytes(8, "little") for x in values],
                memory=self.memory,
                policy=Policy(most_steps=2000),
            )
        except EmulationError:
            self.failure = REAL.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        return (OK,)

    def cuStreamQuery(self, _: Any) -> Any:
        return (self.failure or OK,)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU on the stand-in."""
    monkeypatch.setattr(gpu_module.importlib, "import_module", lambda _: Driver())
    return Gpu()


def small(name: str) -> Litmus:
    """A litmus program with few repetitions on few CTAs."""
    litmus = programs()[name]
    assert isinstance(litmus.play, Kernel)
    return dataclasses.replace(
        litmus, play=dataclasses.replace(litmus.play, repeats=(2, 2), ctas=(2, 2))
    )


def test_it_is_described_and_works(gpu: Gpu):
    assert gpu.describe() == {
        "device": "Stand-in",
        "capability": [9, 0],
        "multiprocessors": 2,
        "cuda_driver_api": 13000,
    }
    assert works(gpu)


def test_a_kernel_that_gives_wrong_words_does_not_work(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_module, "TINY", TINY.replace("3, 7", "3, 8"))
    assert not works(gpu)


def test_a_fault_is_an_error_in_the_drivers_words(gpu: Gpu):
    with pytest.raises(GpuError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu_module.fault(gpu)
    assert "st.global" in FAULT and "AGAIN" in HANG


def test_a_kernel_that_does_not_end_is_waited_for_no_longer_than_patience(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_module, "PATIENCE_S", 0.01)
    gpu._driver.failure = REAL.CUresult.CUDA_ERROR_NOT_READY
    with pytest.raises(TimeoutError, match="has not ended"):
        gpu.wait()


def test_litmus_programs_and_their_controls_run(gpu: Gpu):
    machine = OnGpu(gpu)
    assert machine.arch == HOPPER and machine.multiprocessors == 2
    for name in ("remote-store-read", "reuse"):
        result = judge(small(name), machine)
        assert result.verdict == Verdict.HOLDS, result.text
    wrong = dataclasses.replace(
        small("reuse"), play=lambda machine, broken: small("reuse").play(machine, not broken)
    )
    gpu._driver.failure = None
    with pytest.raises(GpuError):
        judge(wrong, machine)  # the stand-in's kernel breaks a rule, as a GPU's might fault
    gpu._driver.failure = None
    assert control(wrong, machine).data["seen"] is False


def test_dependent_launches_are_programmatic(gpu: Gpu):
    for programmatic in (False, True):
        address = gpu.buffer(np.zeros(32, np.uint32))
        gpu.launch(TINY, "tiny", Shape(programmatic=programmatic), (address,))
    assert gpu._driver.programmatic == [False, True]


def test_no_driver_is_said(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(gpu_module.importlib, "import_module", missing)
    with pytest.raises(GpuError, match="no NVIDIA driver"):
        Gpu()
