#include "tensor_map.h"

#include <string>

#include "errors.h"

namespace fa4_jax {

namespace ffi = xla::ffi;

namespace {

constexpr int kMaxRank = 5;

ffi::Error ElementType(const std::string& subject, ffi::DataType dtype, int* type) {
  switch (dtype) {
    case ffi::BF16:
      *type = cuda::kBfloat16;
      return ffi::Error::Success();
    case ffi::F16:
      *type = cuda::kFloat16;
      return ffi::Error::Success();
    case ffi::F32:
      *type = cuda::kFloat32;
      return ffi::Error::Success();
    default:
      return InvalidArgument(subject, "a tensor map takes bf16, f16 or f32 elements");
  }
}

int Swizzle(int bytes) {
  switch (bytes) {
    case 32:
      return cuda::kSwizzle32;
    case 64:
      return cuda::kSwizzle64;
    case 128:
      return cuda::kSwizzle128;
    default:
      return cuda::kSwizzleNone;
  }
}

// Returns the bytes between neighbours along `axis` of a row-major buffer.
uint64_t ByteStride(const BufferView& buffer, int axis) {
  uint64_t stride = ffi::ByteWidth(buffer.dtype);
  for (size_t i = axis + 1; i < buffer.dims.size(); ++i) stride *= buffer.dims[i];
  return stride;
}

}  // namespace

ffi::Error EncodeTensorMap(const cuda::Driver& driver, const KernelSpec& spec,
                           const ParamSpec& param, const BufferView& buffer, cuda::TensorMap* map) {
  const auto subject = [&] { return "kernel " + spec.name + ", tensor map " + param.name; };
  int type = 0;
  if (ffi::Error error = ElementType("", buffer.dtype, &type); error.failure()) {
    return ElementType(subject(), buffer.dtype, &type);
  }
  uint64_t sizes[kMaxRank];
  uint64_t strides[kMaxRank];
  uint32_t box[kMaxRank];
  uint32_t element_strides[kMaxRank];
  for (int i = 0; i < param.rank; ++i) {
    sizes[i] = buffer.dims[param.axes[i]];
    strides[i] = ByteStride(buffer, param.axes[i]);
    box[i] = param.box[i];
    element_strides[i] = 1;
  }
  const cuda::Result result = driver.cuTensorMapEncodeTiled(
      map, type, param.rank, buffer.data, sizes, strides + 1, box, element_strides,
      cuda::kInterleaveNone, Swizzle(param.swizzle_bytes), cuda::kL2Promotion128,
      cuda::kOutOfBoundsZero);
  if (result == cuda::kSuccess) return ffi::Error::Success();
  std::string shape;
  for (int i = 0; i < param.rank; ++i) shape += (i ? ", " : "") + std::to_string(sizes[i]);
  return CheckDriver(driver, result, subject() + " over sizes (" + shape + ")",
                     "cuTensorMapEncodeTiled");
}

}  // namespace fa4_jax
