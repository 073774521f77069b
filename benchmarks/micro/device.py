"""Runs measurements through the driver API."""

from __future__ import annotations

import ctypes
import importlib
import time
from typing import Any

import numpy as np

from benchmarks.micro.copies import COLUMNS, DATA_BYTES, ROW_BYTES
from benchmarks.micro.grids import Spin
from benchmarks.micro.program import (
    BLACKWELL,
    ENTRY,
    FIELDS,
    HOPPER,
    PER_SM,
    Chase,
    Launch,
    Measurement,
    Tensor,
    result_bytes,
)

# It is compiled code without type stubs, which only machines with a GPU need.
driver: Any = importlib.import_module("cuda.bindings.driver")

_RESULT_BYTES = 1 << 23
_ZEROS_BYTES = 1 << 16
_COLD_BYTES = 1 << 28  # This is several times the L2.
_PATIENCE_S = 10.0
_ANY_TENSOR = Tensor((COLUMNS, 64), (ROW_BYTES,), (COLUMNS, 64))
_CLOCK_CYCLES = 20_000_000


def check(answer: tuple[Any, ...]) -> Any:
    """Returns what a driver call returns in addition to its status.

    Raises:
      RuntimeError: the call failed.
    """
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(status))
    return values[0] if len(values) == 1 else tuple(values)


class Device:
    """One GPU with the memory that the programs use. It keeps modules by their text."""

    def __init__(self, ordinal: int = 0):
        check(driver.cuInit(0))
        self._device = check(driver.cuDeviceGet(ordinal))
        context = check(driver.cuDevicePrimaryCtxRetain(self._device))
        check(driver.cuCtxSetCurrent(context))
        self._stream = check(driver.cuStreamCreate(0))
        self._results = int(check(driver.cuMemAlloc(_RESULT_BYTES)))
        self._data = int(check(driver.cuMemAlloc(DATA_BYTES)))
        check(driver.cuMemsetD8(self._data, 0, DATA_BYTES))
        self._functions: dict[str, Any] = {}
        attributes = driver.CUdevice_attribute
        self.multiprocessors = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        major = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        self.target = HOPPER if major == 9 else BLACKWELL
        self._l2_bytes = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)

    def describe(self) -> dict[str, Any]:
        """Returns name, driver API version, multiprocessors, L2 bytes."""
        name = check(driver.cuDeviceGetName(96, self._device))
        return {
            "device": name.split(b"\0")[0].decode(),
            "cuda_driver_api": check(driver.cuDriverGetVersion()),
            "multiprocessors": self.multiprocessors,
            "l2_bytes": self._l2_bytes,
        }

    def clock_mhz(self) -> float:
        """Returns the multiprocessors' clock: cycles that a kernel counts over the time that it
        takes.
        """
        launch = Launch(threads=32, repeats=_CLOCK_CYCLES, ctas=PER_SM)
        function = self._function(Spin().ptx(self.target), 0)
        begin, end = (check(driver.cuEventCreate(0)) for _ in range(2))
        self._run(function, launch)
        tensor = self._encode(_ANY_TENSOR)
        check(driver.cuEventRecord(begin, self._stream))
        values = (tensor, self._results, self._data, _CLOCK_CYCLES)
        self._launch(function, launch, self.multiprocessors, values)
        check(driver.cuEventRecord(end, self._stream))
        self._wait()
        milliseconds = float(check(driver.cuEventElapsedTime(begin, end)))
        return _CLOCK_CYCLES / milliseconds / 1e3

    def measure(self, measurement: Measurement, launches: int) -> list[float]:
        """Returns the constant, once for each launch; one more launch goes before them."""
        launch = measurement.launch
        function = self._function(measurement.program.ptx(self.target), launch.shared_bytes)
        self._prepare(launch.chase)
        values = []
        for number in range(launches + 1):
            words = self._run(function, launch)
            if number:
                values.append(measurement.constant(words, launch))
        return values

    def _attribute(self, attribute: Any) -> int:
        return int(check(driver.cuDeviceGetAttribute(attribute, self._device)))

    def _function(self, ptx: str, shared_bytes: int) -> Any:
        if ptx not in self._functions:
            library = check(
                driver.cuLibraryLoadData(ptx.encode() + b"\0", None, None, 0, None, None, 0)
            )
            kernel = check(driver.cuLibraryGetKernel(library, ENTRY.encode()))
            self._functions[ptx] = check(driver.cuKernelGetFunction(kernel))
        function = self._functions[ptx]
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        return function

    def _prepare(self, chase: Chase | None) -> None:
        if chase is None:
            return
        words = chase.words(self._data)
        check(driver.cuMemcpyHtoD(self._data, words, words.nbytes))

    def _run(self, function: Any, launch: Launch) -> np.ndarray:
        """Returns the words that the warps leave: [launches in a row, CTAs, warps, FIELDS]."""
        ctas = self.multiprocessors if launch.ctas == PER_SM else launch.ctas
        warps = launch.threads // 32
        one_launch = result_bytes(ctas, launch.threads)
        if launch.in_a_row * one_launch > _RESULT_BYTES:
            raise ValueError(f"{launch}: leaves more than {_RESULT_BYTES} bytes")
        check(driver.cuMemsetD8(self._results, 0, launch.in_a_row * one_launch))
        if launch.chase is None:
            check(driver.cuMemsetD8(self._data, 0, _ZEROS_BYTES))
        if launch.cold:
            check(driver.cuMemsetD8(self._data + DATA_BYTES - _COLD_BYTES, 0, _COLD_BYTES))
        check(driver.cuCtxSynchronize())
        tensor = self._encode(launch.tensor or _ANY_TENSOR)
        for number in range(launch.in_a_row):
            repeats = launch.repeats * (launch.head_start if number == 0 else 1)
            results = self._results + number * one_launch
            self._launch(function, launch, ctas, (tensor, results, self._data, repeats))
        self._wait()
        words = np.empty((launch.in_a_row, one_launch // 8), np.int64)
        check(driver.cuMemcpyDtoH(words, self._results, words.nbytes))
        words = words[:, : ctas * warps * FIELDS]
        return words.reshape(launch.in_a_row, ctas, warps, FIELDS)

    def _launch(self, function: Any, launch: Launch, ctas: int, values: tuple[Any, ...]) -> None:
        types = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
        check(
            driver.cuLaunchKernel(
                function,
                *(ctas, 1, 1),
                *(launch.threads, 1, 1),
                launch.shared_bytes,
                self._stream,
                (values, types),
                0,
            )
        )

    def _wait(self) -> None:
        """Waits for the stream, with a limit: a broken program must not occupy the GPU."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            (status,) = driver.cuStreamQuery(self._stream)
            if status == driver.CUresult.CUDA_SUCCESS:
                return
            if status != driver.CUresult.CUDA_ERROR_NOT_READY:
                raise RuntimeError(str(status))
            if time.monotonic() > end:
                raise TimeoutError(f"a program has not ended in {_PATIENCE_S} s")

    def _encode(self, tensor: Tensor) -> Any:
        first_enumerators = (
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return check(
            driver.cuTensorMapEncodeTiled(
                driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                len(tensor.sizes),
                self._data,
                [driver.cuuint64_t(size) for size in tensor.sizes],
                [driver.cuuint64_t(stride) for stride in tensor.byte_strides],
                [driver.cuuint32_t(size) for size in tensor.box],
                [driver.cuuint32_t(1)] * len(tensor.sizes),
                *first_enumerators,
            )
        )
