"""Runs PTX on the first GPU through the driver API, with a wait that has a limit."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

PATIENCE_S = 30.0

TINY = """\
.version 8.0
.target sm_90
.address_size 64
.visible .entry tiny(.param .u64 data)
.reqntid 32, 1, 1
{
.reg .b32 %r<2>;
.reg .b64 %d<3>;
ld.param.b64 %d1, [data];
mov.u32 %r1, %tid.x;
mul.wide.u32 %d2, %r1, 4;
add.s64 %d1, %d1, %d2;
mad.lo.s32 %r1, %r1, 3, 7;
st.global.b32 [%d1], %r1;
ret;
}
"""
"""A kernel that every working GPU gets right: word i becomes 3 i + 7."""

HANG = """\
.version 8.0
.target sm_90
.address_size 64
.visible .entry hang(.param .u64 data)
.reqntid 32, 1, 1
{
.reg .pred %p;
.reg .b32 %r;
.reg .b64 %d;
ld.param.b64 %d, [data];
AGAIN:
ld.volatile.global.b32 %r, [%d];
setp.ne.b32 %p, %r, 1;
@%p bra AGAIN;
ret;
}
"""
"""A kernel that waits for a word which nobody writes."""

FAULT = """\
.version 8.0
.target sm_90
.address_size 64
.visible .entry fault(.param .u64 data)
.reqntid 32, 1, 1
{
.reg .b64 %d;
mov.b64 %d, 64;
st.global.b64 [%d], %d;
ret;
}
"""
"""A kernel that writes to an address that belongs to nothing."""


class GpuError(RuntimeError):
    """A driver call failed; the message has the driver's words."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a kernel is launched.

    Attributes:
      cluster: number of CTAs of a cluster, as the kernel's text says.
      programmatic: whether it may start while the launch before it still runs.
    """

    grid: int = 1
    threads: int = 32
    shared_bytes: int = 0
    cluster: int = 1
    programmatic: bool = False


class Gpu:
    """The first GPU, with one stream. Kernels are kept by their text.

    Raises:
      GpuError: there is no driver or no GPU.
    """

    def __init__(self) -> None:
        try:
            # It is compiled code without type stubs, which only machines with a GPU need.
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
            self.call("cuInit", 0)
        except (ImportError, RuntimeError) as error:
            raise GpuError(f"no NVIDIA driver: {error}") from error
        self._device = self.call("cuDeviceGet", 0)
        context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self.call("cuCtxSetCurrent", context)
        self._stream = self.call("cuStreamCreate", 0)
        self._kernels: dict[str, Any] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """Returns what a driver function returns in addition to its status.

        Raises:
          GpuError: the call failed.
        """
        status, *values = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise GpuError(f"{name}: {status.name}")
        return values[0] if len(values) == 1 else tuple(values)

    def attribute(self, name: str) -> int:
        """Returns a device attribute, by its name after CU_DEVICE_ATTRIBUTE_."""
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, self._device))

    def describe(self) -> dict[str, Any]:
        """Returns name, compute capability, multiprocessors and the CUDA version of the driver."""
        name = self.call("cuDeviceGetName", 96, self._device)
        major = self.attribute("COMPUTE_CAPABILITY_MAJOR")
        return {
            "device": name.split(b"\0")[0].decode(),
            "capability": [major, self.attribute("COMPUTE_CAPABILITY_MINOR")],
            "multiprocessors": self.attribute("MULTIPROCESSOR_COUNT"),
            "cuda_driver_api": self.call("cuDriverGetVersion"),
        }

    def load(self, image: bytes, name: str) -> Any:
        """Loads a kernel of a cubin or of PTX; the driver compiles the latter."""
        library = self.call("cuLibraryLoadData", image, None, None, 0, None, None, 0)
        kernel = self.call("cuLibraryGetKernel", library, name.encode())
        return self.call("cuKernelGetFunction", kernel)

    def registers(self, function: Any) -> int:
        """Returns the registers of a thread of a loaded kernel, as it starts."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return int(self.call("cuFuncGetAttribute", attribute, function))

    def buffer(self, data: np.ndarray) -> int:
        """Returns the address of a copy of the data on the device."""
        address = int(self.call("cuMemAlloc", data.nbytes))
        self.write(address, data)
        return address

    def write(self, address: int, data: np.ndarray) -> None:
        """Copies to the device."""
        data = np.ascontiguousarray(data)
        self.call("cuMemcpyHtoD", address, data, data.nbytes)

    def read(self, address: int, data: np.ndarray) -> None:
        """Copies from the device into `data`."""
        self.call("cuMemcpyDtoH", data, address, data.nbytes)

    def launch(self, ptx: str, name: str, shape: Shape, values: Sequence[int]) -> None:
        """Queues a kernel. Parameters are 64-bit integers; clusters are fixed in the text."""
        driver = self._driver
        if ptx not in self._kernels:
            self._kernels[ptx] = self.load(ptx.encode() + b"\0", name)
        function = self._kernels[ptx]
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.call("cuFuncSetAttribute", function, attribute, shape.shared_bytes)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
        config.sharedMemBytes, config.hStream = shape.shared_bytes, self._stream
        if shape.programmatic:
            allowed = driver.CUlaunchAttribute()
            names = driver.CUlaunchAttributeID
            allowed.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            allowed.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [allowed], 1
        types = (ctypes.c_void_p,) * len(values)
        self.call("cuLaunchKernelEx", config, function, (tuple(values), types), 0)

    def wait(self) -> None:
        """Waits for all launches.

        Raises:
          GpuError: one failed.
          TimeoutError: one has not ended in time.
        """
        codes, end = self._driver.CUresult, time.monotonic() + PATIENCE_S
        while (status := self._driver.cuStreamQuery(self._stream)[0]) != codes.CUDA_SUCCESS:
            if status != codes.CUDA_ERROR_NOT_READY:
                raise GpuError(status.name)
            if time.monotonic() > end:
                raise TimeoutError(f"a kernel has not ended in {PATIENCE_S:.0f} s")
            time.sleep(1e-4)


def works(gpu: Gpu) -> bool:
    """Returns whether the GPU runs a tiny kernel and gives the right words."""
    words = np.zeros(32, np.uint32)
    address = gpu.buffer(words)
    gpu.launch(TINY, "tiny", Shape(), (address,))
    gpu.wait()
    gpu.read(address, words)
    return bool((words == 3 * np.arange(32) + 7).all())


def hang(gpu: Gpu) -> None:
    """Never returns: waits without end for a kernel that does not end."""
    gpu.launch(HANG, "hang", Shape(), (gpu.buffer(np.zeros(1, np.uint32)),))
    gpu.call("cuCtxSynchronize")


def fault(gpu: Gpu) -> None:
    """Runs a kernel that faults.

    Raises:
      GpuError: as it should.
    """
    gpu.launch(FAULT, "fault", Shape(), (0,))
    gpu.wait()
