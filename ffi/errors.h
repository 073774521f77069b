// The handler's errors: each names the kernel and what failed.
#ifndef FA4_JAX_FFI_ERRORS_H_
#define FA4_JAX_FFI_ERRORS_H_

#include <string>
#include <utility>

#include "driver_api.h"
#include "xla/ffi/api/ffi.h"

namespace fa4_jax {

inline xla::ffi::Error InvalidArgument(const std::string& subject, const std::string& what) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument,
                         "fa4_jax: " + subject + ": " + what);
}

inline xla::ffi::Error FailedPrecondition(const std::string& subject, const std::string& what) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kFailedPrecondition,
                         "fa4_jax: " + subject + ": " + what);
}

// Returns success, or an error that names the driver call which returned `result`.
inline xla::ffi::Error CheckDriver(const cuda::Driver& driver, cuda::Result result,
                                   const std::string& subject, const char* call) {
  if (result == cuda::kSuccess) return xla::ffi::Error::Success();
  return xla::ffi::Error(
      xla::ffi::ErrorCode::kInternal,
      "fa4_jax: " + subject + ": " + call + " failed with " + cuda::Describe(driver, result));
}

}  // namespace fa4_jax

#define FA4_JAX_RETURN_IF_ERROR(expression)                                     \
  do {                                                                          \
    if (xla::ffi::Error error_ = (expression); error_.failure()) return error_; \
  } while (false)

#endif  // FA4_JAX_FFI_ERRORS_H_
