// Pieces of the JSON in which the stand-in driver and the host-code shim log launches.
#ifndef FA4_JAX_FFI_TESTING_LAUNCH_LOG_H_
#define FA4_JAX_FFI_TESTING_LAUNCH_LOG_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fa4_jax {

// Returns "[1, 2, 3]".
inline std::string LogTriple(const uint32_t* values) {
  return "[" + std::to_string(values[0]) + ", " + std::to_string(values[1]) + ", " +
         std::to_string(values[2]) + "]";
}

// Returns kernel parameters of the given sizes as a list of hexadecimal strings.
inline std::string LogParams(const std::vector<int>& sizes, void* const* params) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += i > 0 ? ", \"" : "\"";
    const unsigned char* bytes = static_cast<const unsigned char*>(params[i]);
    for (int j = 0; j < sizes[i]; ++j) {
      text += "0123456789abcdef"[bytes[j] >> 4];
      text += "0123456789abcdef"[bytes[j] & 15];
    }
    text += "\"";
  }
  return text + "]";
}

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_TESTING_LAUNCH_LOG_H_
