// What Python hands over for each kernel: one manifest record (fa4_jax/manifest.py) as plain data.
//
// fa4_jax/runtime.py declares the same structures for ctypes; kAbiVersion tells a stale library.
// Everything pointed to is borrowed for the time of the call.
#ifndef FA4_JAX_FFI_KERNEL_RECORD_H_
#define FA4_JAX_FFI_KERNEL_RECORD_H_

#include <cstdint>

namespace fa4_jax {

inline constexpr int32_t kAbiVersion = 1;

enum class ParamKind : int32_t {
  kTensorMap = 0,
  kPointer = 1,
  kDim = 2,
  kSize = 3,
  kInt32 = 4,
  kFloat32 = 5,
  kSmCount = 6,
};

// A range of KernelRecord::factors (for a size) or KernelRecord::sizes (for a shape).
struct Range {
  int32_t begin;
  int32_t end;
};

// value = constant if buffer < 0, else ceil(shape[buffer][axis] / divisor) * multiple.
struct FactorRecord {
  int64_t constant;
  int32_t buffer;
  int32_t axis;
  int32_t divisor;
  int32_t multiple;
};

// `buffer` indexes operands, then results.
struct ParamRecord {
  const char* name;
  int32_t kind;
  int32_t buffer;
  int32_t rank;
  int32_t swizzle_bytes;
  int32_t axes[5];
  int32_t box[5];
  Range size;
};

// An operand (dtype "" where the manifest names none) or a result (with its shape).
struct BufferRecord {
  const char* name;
  const char* dtype;
  int32_t alias;  // the operand that a result shares memory with, or -1
  Range shape;
};

struct KernelRecord {
  const char* name;
  const char* arch;
  const char* dtype;
  const char* file;
  const char* sha256;
  const char* symbol;
  const BufferRecord* buffers;
  const ParamRecord* params;
  const Range* sizes;
  const FactorRecord* factors;
  int32_t num_operands;
  int32_t num_results;
  int32_t num_params;
  int32_t num_sizes;
  int32_t num_factors;
  uint32_t block[3];
  uint32_t cluster[3];
  uint32_t dynamic_shared_bytes;
  uint32_t persistent;
  Range grid[3];
};

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_KERNEL_RECORD_H_
