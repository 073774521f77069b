// Host memory that a kernel may use while it runs, for JAX's CPU platform.
//
// A device reads and writes host memory only where the driver has registered it. Registration is
// also how a stand-in for the driver learns each buffer's extent and which it must not write.
#ifndef FA4_JAX_FFI_HOST_MEMORY_H_
#define FA4_JAX_FFI_HOST_MEMORY_H_

#include "driver_api.h"
#include "kernel.h"
#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace fa4_jax {

// Registers buffers with the driver, and takes that back when it is destroyed.
class HostMemory {
 public:
  explicit HostMemory(const cuda::Driver& driver) : driver_(driver) {}
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // Registers every buffer of a call that has checked buffers: operands for reading, results for
  // writing too. Buffers at the same address are registered once.
  xla::ffi::Error Register(const KernelSpec& spec, const Buffers& buffers);

 private:
  const cuda::Driver& driver_;
  void* registered_[kMaxBuffers];
  int32_t count_ = 0;
};

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_HOST_MEMORY_H_
