// cuTensorMapEncodeTiled for stand-ins: the bit layout that drivers use (found by
// comparing with a driver's own output), under the restrictions that the driver documents for its
// arguments.
#ifndef FA4_JAX_FFI_TESTING_ENCODE_TENSOR_MAP_H_
#define FA4_JAX_FFI_TESTING_ENCODE_TENSOR_MAP_H_

#include <cstdint>
#include <cstring>

#include "../driver_api.h"

namespace fa4_jax {

struct TensorMapArguments {
  int type;
  uint32_t rank;
  void* address;
  const uint64_t* sizes;
  const uint64_t* strides;
  const uint32_t* box;
  int swizzle;
  int l2_promotion;
};

inline bool Valid(const TensorMapArguments& map) {
  if (reinterpret_cast<uintptr_t>(map.address) % 16 != 0) return false;
  if (map.rank < 1 || map.rank > 5) return false;
  for (uint32_t i = 0; i < map.rank; ++i) {
    if (map.sizes[i] == 0 || map.sizes[i] > uint64_t{1} << 32) return false;
    if (map.box[i] == 0 || map.box[i] > 256) return false;
  }
  for (uint32_t i = 0; i + 1 < map.rank; ++i) {
    if (map.strides[i] % 16 != 0 || map.strides[i] >= uint64_t{1} << 40) return false;
  }
  const uint32_t inner = map.box[0] * (map.type == cuda::kFloat32 ? 4 : 2);
  return inner % 16 == 0 && (map.swizzle == 0 || inner <= (16u << map.swizzle));
}

inline void Encode(const TensorMapArguments& map, cuda::TensorMap* out) {
  std::memset(out, 0, sizeof(*out));
  uint8_t* bytes = reinterpret_cast<uint8_t*>(out);
  uint32_t words[16] = {};
  uint64_t span = map.sizes[0];
  if (map.rank > 1) span = map.sizes[map.rank - 1] * map.strides[map.rank - 2];
  const uint32_t type = map.type == cuda::kBfloat16 ? 10 : map.type;
  words[2] = (map.rank - 1) << 4 | type << 7 | static_cast<uint32_t>(map.swizzle) << 13 |
             static_cast<uint32_t>(map.l2_promotion) << 17 |
             static_cast<uint32_t>(span >= 128 * 1024) << 21;
  for (uint32_t i = 0; i + 1 < map.rank; ++i) {
    words[3 + i] = static_cast<uint32_t>(map.strides[i] / 16);
    words[7] |= static_cast<uint32_t>(map.strides[i] >> 36) << (4 * i);
  }
  for (uint32_t i = 0; i < map.rank; ++i) words[8 + i] = static_cast<uint32_t>(map.sizes[i] - 1);
  std::memcpy(bytes, words, sizeof(words));
  std::memcpy(bytes, &map.address, sizeof(map.address));
  for (uint32_t i = 0; i < map.rank; ++i) bytes[55 + i] = static_cast<uint8_t>(map.box[i] - 1);
}

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_TESTING_ENCODE_TENSOR_MAP_H_
