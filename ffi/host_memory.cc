#include "host_memory.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "errors.h"

namespace fa4_jax {

namespace ffi = xla::ffi;

namespace {

size_t NumBytes(const BufferView& buffer) {
  size_t bytes = ffi::ByteWidth(buffer.dtype);
  for (const int64_t dim : buffer.dims) bytes *= dim;
  return bytes;
}

}  // namespace

HostMemory::~HostMemory() {
  for (int32_t i = 0; i < count_; ++i) driver_.cuMemHostUnregister(registered_[i]);
}

ffi::Error HostMemory::Register(const KernelSpec& spec, const Buffers& buffers) {
  // Results come first: one that shares an operand's memory decides that it may be written.
  for (int32_t i = buffers.count - 1; i >= 0; --i) {
    const size_t bytes = NumBytes(buffers[i]);
    void** const end = registered_ + count_;
    if (bytes == 0 || std::find(registered_, end, buffers[i].data) != end) continue;
    const unsigned flags = i < spec.num_operands ? cuda::kHostMemoryReadOnly : 0;
    const cuda::Result result = driver_.cuMemHostRegister_v2(buffers[i].data, bytes, flags);
    FA4_JAX_RETURN_IF_ERROR(CheckDriver(driver_, result,
                                        "kernel " + spec.name + ", buffer " + spec.buffers[i].name,
                                        "cuMemHostRegister_v2"));
    registered_[count_++] = buffers[i].data;
  }
  return ffi::Error::Success();
}

}  // namespace fa4_jax
