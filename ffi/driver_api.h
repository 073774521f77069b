// The part of the CUDA driver API that a launch needs, found at run time.
//
// The types restate the driver's documented binary interface, so that building takes no CUDA
// toolkit; tests/ffi/driver_api_test.cc compares them with cuda.h where one is installed.
#ifndef FA4_JAX_FFI_DRIVER_API_H_
#define FA4_JAX_FFI_DRIVER_API_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace fa4_jax::cuda {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using Library = struct OpaqueLibrary*;
using Kernel = struct OpaqueKernel*;
using Function = struct OpaqueFunction*;
using Stream = struct OpaqueStream*;

inline constexpr Result kSuccess = 0;

inline constexpr int kDeviceMultiprocessorCount = 16;
inline constexpr int kDeviceComputeCapabilityMajor = 75;
inline constexpr int kDeviceComputeCapabilityMinor = 76;

inline constexpr int kFunctionMaxDynamicSharedBytes = 8;

inline constexpr uint32_t kLaunchClusterDimension = 4;
inline constexpr uint32_t kLaunchProgrammaticStreamSerialization = 6;

inline constexpr unsigned kHostMemoryReadOnly = 8;

struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

enum TensorMapType : int { kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9 };
enum TensorMapSwizzle : int { kSwizzleNone = 0, kSwizzle32 = 1, kSwizzle64 = 2, kSwizzle128 = 3 };
inline constexpr int kInterleaveNone = 0;
inline constexpr int kL2Promotion128 = 2;
inline constexpr int kOutOfBoundsZero = 0;

struct LaunchAttribute {
  uint32_t id;
  uint32_t padding;
  union {
    uint64_t words[8];
    uint32_t cluster[3];
    int32_t programmatic_stream_serialization_allowed;
  } value;
};

struct LaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t dynamic_shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  uint32_t num_attributes;
};

// Entry points of the driver library. The names are the driver's own.
struct Driver {
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuGetErrorString)(Result, const char**);
  Result (*cuDriverGetVersion)(int* cuda_version);  // 1000 * major + 10 * minor
  Result (*cuCtxGetDevice)(Device*);
  Result (*cuDeviceGetAttribute)(int*, int attribute, Device);
  Result (*cuLibraryLoadData)(Library*, const void* image, int* jit_options, void** jit_values,
                              unsigned num_jit_options, int* library_options, void** library_values,
                              unsigned num_library_options);
  Result (*cuLibraryGetKernel)(Kernel*, Library, const char* symbol);
  Result (*cuKernelGetFunction)(Function*, Kernel);
  Result (*cuKernelSetAttribute)(int attribute, int value, Kernel, Device);
  Result (*cuTensorMapEncodeTiled)(TensorMap*, int type, uint32_t rank, void* address,
                                   const uint64_t* sizes, const uint64_t* byte_strides,
                                   const uint32_t* box, const uint32_t* element_strides,
                                   int interleave, int swizzle, int l2_promotion, int oob_fill);
  Result (*cuMemsetD32Async)(DevicePointer, uint32_t value, size_t count, Stream);
  Result (*cuMemHostRegister_v2)(void* address, size_t bytes, unsigned flags);
  Result (*cuMemHostUnregister)(void* address);
  // Takes a Kernel in a Function's place, as the driver documents.
  Result (*cuLaunchKernelEx)(const LaunchConfig*, Function, void** params, void** extra);
};

// A loaded driver, or the reason why there is none.
struct DriverOrError {
  Driver driver = {};
  std::string error;
};

// Opens `FA4_JAX_LIBCUDA` if that is set, otherwise libcuda.so.1. This happens once per process, at
// the first call.
const DriverOrError& GetDriver();

// Returns "CUDA_ERROR_X (explanation)".
std::string Describe(const Driver& driver, Result result);

}  // namespace fa4_jax::cuda

#endif  // FA4_JAX_FFI_DRIVER_API_H_
