// ffi/driver_api.h restates parts of cuda.h; compiling this with a CUDA toolkit compares them.
#include "driver_api.h"

#include <cuda.h>

#include <cstddef>

namespace fa4_jax::cuda {

#define SAME_SIZE(ours, theirs) \
  static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) <= alignof(theirs))
#define SAME_OFFSET(ours, our_field, theirs, their_field) \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field))

SAME_SIZE(Result, CUresult);
SAME_SIZE(Device, CUdevice);
SAME_SIZE(DevicePointer, CUdeviceptr);
SAME_SIZE(TensorMap, CUtensorMap);
SAME_SIZE(LaunchAttribute, CUlaunchAttribute);
SAME_SIZE(LaunchConfig, CUlaunchConfig);
SAME_OFFSET(LaunchAttribute, id, CUlaunchAttribute, id);
SAME_OFFSET(LaunchAttribute, value, CUlaunchAttribute, value);
SAME_OFFSET(LaunchConfig, grid, CUlaunchConfig, gridDimX);
SAME_OFFSET(LaunchConfig, block, CUlaunchConfig, blockDimX);
SAME_OFFSET(LaunchConfig, dynamic_shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME_OFFSET(LaunchConfig, stream, CUlaunchConfig, hStream);
SAME_OFFSET(LaunchConfig, attributes, CUlaunchConfig, attrs);
SAME_OFFSET(LaunchConfig, num_attributes, CUlaunchConfig, numAttrs);

static_assert(kSuccess == CUDA_SUCCESS);
static_assert(kDeviceMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kDeviceComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kDeviceComputeCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kFunctionMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(kHostMemoryReadOnly == CU_MEMHOSTREGISTER_READ_ONLY);
static_assert(kLaunchClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(static_cast<int>(kFloat16) == CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
static_assert(static_cast<int>(kFloat32) == CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
static_assert(static_cast<int>(kBfloat16) == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
static_assert(static_cast<int>(kSwizzleNone) == CU_TENSOR_MAP_SWIZZLE_NONE);
static_assert(static_cast<int>(kSwizzle32) == CU_TENSOR_MAP_SWIZZLE_32B);
static_assert(static_cast<int>(kSwizzle64) == CU_TENSOR_MAP_SWIZZLE_64B);
static_assert(static_cast<int>(kSwizzle128) == CU_TENSOR_MAP_SWIZZLE_128B);
static_assert(kInterleaveNone == CU_TENSOR_MAP_INTERLEAVE_NONE);
static_assert(kL2Promotion128 == CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
static_assert(kOutOfBoundsZero == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

}  // namespace fa4_jax::cuda

int main() { return 0; }
