// The functions that fa4_jax/runtime.py calls through ctypes, in addition to the FFI handlers.
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "driver_api.h"
#include "kernel_record.h"
#include "registry.h"
#include "sha256.h"

namespace {

// Keeps a message alive until the thread's next call.
const char* Keep(std::string message) {
  static thread_local std::string kept;
  kept = std::move(message);
  return kept.c_str();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int fa4_jax_abi_version() { return fa4_jax::kAbiVersion; }

// Adds all kernels or none. Returns nullptr, or what is wrong.
const char* fa4_jax_register(const fa4_jax::Records* records) {
  xla::ffi::ErrorOr<std::vector<fa4_jax::KernelSpec>> specs = fa4_jax::ReadRecords(*records);
  if (specs.has_error()) return Keep(specs.error().message());
  fa4_jax::AddKernels(std::move(*specs));
  return nullptr;
}

// Returns nullptr if the CUDA driver library (or its stand-in) could be opened, otherwise why not.
const char* fa4_jax_driver_error() {
  const std::string& error = fa4_jax::cuda::GetDriver().error;
  return error.empty() ? nullptr : error.c_str();
}

// Returns 10 * major + minor of a device, or -1.
int fa4_jax_compute_capability(int device) {
  const fa4_jax::cuda::DriverOrError& found = fa4_jax::cuda::GetDriver();
  if (!found.error.empty()) return -1;
  int major = 0;
  int minor = 0;
  const auto get = found.driver.cuDeviceGetAttribute;
  if (get(&major, fa4_jax::cuda::kDeviceComputeCapabilityMajor, device) != 0 ||
      get(&minor, fa4_jax::cuda::kDeviceComputeCapabilityMinor, device) != 0) {
    return -1;
  }
  return 10 * major + minor;
}

// Returns 1000 * major + 10 * minor of the newest CUDA that the driver supports, or 0
// if it does not say.
int fa4_jax_driver_cuda_version() {
  const fa4_jax::cuda::DriverOrError& found = fa4_jax::cuda::GetDriver();
  int version = 0;
  if (!found.error.empty() || found.driver.cuDriverGetVersion(&version) != 0) return 0;
  return version;
}

const char* fa4_jax_sha256(const void* data, size_t size) {
  return Keep(fa4_jax::Sha256(data, size));
}

}  // extern "C"
#pragma GCC visibility pop
