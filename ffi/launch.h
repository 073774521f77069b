// Makes one kernel launch from the buffers and attributes of one FFI call.
#ifndef FA4_JAX_FFI_LAUNCH_H_
#define FA4_JAX_FFI_LAUNCH_H_

#include <cstdint>

#include "driver_api.h"
#include "kernel.h"
#include "xla/ffi/api/ffi.h"

namespace fa4_jax {

struct BufferView {
  void* data;
  xla::ffi::DataType dtype;
  xla::ffi::Span<const int64_t> dims;
};

// The operands, then the results of a call.
struct Buffers {
  BufferView items[kMaxBuffers];
  int32_t count = 0;

  const BufferView& operator[](int32_t index) const { return items[index]; }
};

struct LaunchTarget {
  const cuda::Driver& driver;
  cuda::Device device;
  cuda::Stream stream;
};

// Checks types, ranks, result shapes and aliasing against the manifest.
xla::ffi::Error CheckBuffers(const KernelSpec& spec, const Buffers& buffers);

// Launches a kernel that is ready on the target's device, after it has written zeros to the results
// that ask for them. Nothing is launched or written if the grid is empty.
xla::ffi::Error Launch(const Kernel& kernel, const Buffers& buffers,
                       const xla::ffi::Dictionary& attributes, const LaunchTarget& target);

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_LAUNCH_H_
