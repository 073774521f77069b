// The tables that Python passes: the manifest's records (fa4_jax/manifest.py) as plain data.
//
// fa4_jax/registration.py packs the same layouts; kAbiVersion tells a stale library. All strings
// are offsets into one block of zero-terminated text, all ranges index the tables below. Everything
// is borrowed for the duration of the call.
#ifndef FA4_JAX_FFI_KERNEL_RECORD_H_
#define FA4_JAX_FFI_KERNEL_RECORD_H_

#include <cstdint>

namespace fa4_jax {

inline constexpr int32_t kAbiVersion = 5;

enum class ParamKind : int32_t {
  kTensorMap = 0,
  kPointer = 1,
  kDim = 2,
  kSize = 3,
  kInt32 = 4,
  kFloat32 = 5,
  kSmCount = 6,
};

struct Range {
  int32_t begin;
  int32_t end;
};

// value = constant if buffer < 0, else ceil(shape[buffer][axis] / divisor) * multiple. Buffers are
// numbered within their kernel: operands, then results.
struct FactorRecord {
  int64_t constant;
  int32_t buffer;
  int32_t axis;
  int32_t divisor;
  int32_t multiple;
};
static_assert(sizeof(FactorRecord) == 24);

struct ParamRecord {
  int32_t name;
  int32_t kind;
  int32_t buffer;
  int32_t rank;
  int32_t swizzle_bytes;
  int32_t axes[5];
  int32_t box[5];
  Range size;  // of factors
};
static_assert(sizeof(ParamRecord) == 68);

// An operand (dtype "" where the manifest names none) or a result (with its shape).
struct BufferRecord {
  int32_t name;
  int32_t dtype;
  int32_t alias;  // the operand that a result shares memory with, or -1
  Range shape;    // of sizes
  uint32_t zeroed;
};
static_assert(sizeof(BufferRecord) == 24);

struct KernelRecord {
  int32_t name;
  int32_t arch;
  int32_t dtype;
  int32_t file;
  int32_t sha256;
  int32_t symbol;
  int32_t num_operands;
  Range buffers;
  Range params;
  Range grid[3];  // of factors
  uint32_t block[3];
  uint32_t cluster[3];
  uint32_t dynamic_shared_bytes;
  uint32_t persistent;
  uint32_t programmatic;
};
static_assert(sizeof(KernelRecord) == 104);

struct Records {
  const char* strings;
  const KernelRecord* kernels;
  const BufferRecord* buffers;
  const ParamRecord* params;
  const Range* sizes;  // of factors
  const FactorRecord* factors;
  int32_t num_string_bytes;
  int32_t num_kernels;
  int32_t num_buffers;
  int32_t num_params;
  int32_t num_sizes;
  int32_t num_factors;
};

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_KERNEL_RECORD_H_
