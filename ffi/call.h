// What one FFI call launches: kernels in order, each with its buffers.
#ifndef FA4_JAX_FFI_CALL_H_
#define FA4_JAX_FFI_CALL_H_

#include <array>
#include <vector>

#include "driver_api.h"
#include "kernel.h"
#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace fa4_jax {

inline constexpr int kMaxLaunches = 4;

struct Call {
  std::array<Kernel*, kMaxLaunches> kernels;
  int count = 0;
  const cuda::Driver* driver;
  cuda::Device device;
};

// Resolves the kernels that the attribute `kernel` names, separated by commas, and makes them
// launchable on the current device.
xla::ffi::Error ResolveCall(const xla::ffi::Dictionary& attributes, Call* call);

// Finds every kernel's buffers and checks them. A kernel reads a result of an earlier kernel of the
// call, or shares its memory, where the names are the same. The call's operands are the others, in
// the order of their first use; its results are those of all kernels, in order.
xla::ffi::Error BindBuffers(const Call& call, xla::ffi::RemainingArgs operands,
                            xla::ffi::RemainingRets results, std::vector<Buffers>* buffers);

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_CALL_H_
