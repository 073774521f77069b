// SHA-256 (FIPS 180-4), which detects a damaged cubin before the driver sees it.
#ifndef FA4_JAX_FFI_SHA256_H_
#define FA4_JAX_FFI_SHA256_H_

#include <cstddef>
#include <string>

namespace fa4_jax {

// Returns the lower-case hexadecimal digest of `size` bytes.
std::string Sha256(const void* data, size_t size);

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_SHA256_H_
