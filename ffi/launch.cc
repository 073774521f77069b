#include "launch.h"

#include <algorithm>
#include <string>

#include "errors.h"
#include "tensor_map.h"

namespace fa4_jax {

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kMaxGrid[3] = {2147483647, 65535, 65535};

std::string TypeName(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::BF16:
      return "bf16";
    case ffi::F16:
      return "fp16";
    case ffi::F32:
      return "f32";
    case ffi::S32:
      return "i32";
    default:
      return "XLA type " + std::to_string(static_cast<int>(dtype));
  }
}

int64_t EvaluateFactor(const FactorRecord& factor, const Buffers& buffers) {
  if (factor.buffer < 0) return factor.constant;
  const int64_t extent = buffers[factor.buffer].dims[factor.axis];
  return (extent + factor.divisor - 1) / factor.divisor * factor.multiple;
}

int64_t EvaluateSize(const KernelSpec& spec, Range size, const Buffers& buffers) {
  int64_t value = 1;
  for (int32_t i = size.begin; i < size.end; ++i)
    value *= EvaluateFactor(spec.tables->factors[i], buffers);
  return value;
}

std::string Subject(const KernelSpec& spec, int32_t buffer) {
  return "kernel " + spec.name + (buffer < spec.num_operands ? ", operand " : ", result ") +
         spec.buffers[buffer].name;
}

// The manifest names no operand types; a 16-bit float is always the kernel's own.
ffi::Error CheckType(const KernelSpec& spec, int32_t index, ffi::DataType dtype) {
  const bool half = dtype == ffi::BF16 || dtype == ffi::F16;
  const ffi::DataType expected = spec.buffers[index].dtype.value_or(half ? spec.dtype : dtype);
  if (dtype == expected) return ffi::Error::Success();
  return InvalidArgument(Subject(spec, index),
                         "has type " + TypeName(dtype) + ", must be " + TypeName(expected));
}

ffi::Error CheckResultShape(const KernelSpec& spec, int32_t index, const Buffers& buffers) {
  const Range shape = spec.buffers[index].shape;
  const BufferView& buffer = buffers[index];
  const size_t rank = shape.end - shape.begin;
  if (buffer.dims.size() != rank) {
    return InvalidArgument(Subject(spec, index), "has " + std::to_string(buffer.dims.size()) +
                                                     " dimensions, must have " +
                                                     std::to_string(rank));
  }
  for (size_t axis = 0; axis < rank; ++axis) {
    const int64_t expected = EvaluateSize(spec, spec.tables->sizes[shape.begin + axis], buffers);
    if (buffer.dims[axis] != expected) {
      return InvalidArgument(Subject(spec, index), "axis " + std::to_string(axis) + " is " +
                                                       std::to_string(buffer.dims[axis]) +
                                                       ", must be " + std::to_string(expected));
    }
  }
  return ffi::Error::Success();
}

// Holds kernel parameters in the driver's form. It lives on the stack of one launch.
struct Arguments {
  cuda::TensorMap maps[kMaxTensorMaps];
  union Slot {
    void* pointer;
    int32_t i32;
    float f32;
  } slots[kMaxParams];
  void* params[kMaxParams];
};

struct Packing {
  const Kernel& kernel;
  const Buffers& buffers;
  const ffi::Dictionary& attributes;
  const LaunchTarget& target;
};

ffi::Error PackInteger(const KernelSpec& spec, const ParamSpec& param, int64_t value,
                       Arguments::Slot* slot) {
  slot->i32 = static_cast<int32_t>(value);
  if (slot->i32 == value) return ffi::Error::Success();
  return InvalidArgument("kernel " + spec.name + ", parameter " + param.name,
                         std::to_string(value) + " does not fit in 32 bits");
}

template <typename T>
ffi::Error PackAttribute(const KernelSpec& spec, const ParamSpec& param,
                         const ffi::Dictionary& attributes, T* slot) {
  ffi::ErrorOr<T> value = attributes.get<T>(param.name);
  if (value.has_error()) {
    return InvalidArgument("kernel " + spec.name + ", attribute " + param.name,
                           value.error().message());
  }
  *slot = *value;
  return ffi::Error::Success();
}

// Packs every kind except tensor maps.
ffi::Error PackSlot(const Packing& packing, const ParamSpec& param, Arguments::Slot* slot) {
  const KernelSpec& spec = packing.kernel.spec();
  const Buffers& buffers = packing.buffers;
  switch (param.kind) {
    case ParamKind::kPointer:
      slot->pointer = buffers[param.buffer].data;
      return ffi::Error::Success();
    case ParamKind::kDim:
      return PackInteger(spec, param, buffers[param.buffer].dims[param.axes[0]], slot);
    case ParamKind::kSize:
      return PackInteger(spec, param, EvaluateSize(spec, param.size, buffers), slot);
    case ParamKind::kInt32:
      return PackAttribute(spec, param, packing.attributes, &slot->i32);
    case ParamKind::kFloat32:
      return PackAttribute(spec, param, packing.attributes, &slot->f32);
    case ParamKind::kSmCount:
      slot->i32 = packing.kernel.multiprocessors(packing.target.device);
      return ffi::Error::Success();
    case ParamKind::kTensorMap:
      break;
  }
  return InvalidArgument("kernel " + spec.name + ", parameter " + param.name, "unknown kind");
}

ffi::Error Pack(const Packing& packing, Arguments* arguments) {
  const KernelSpec& spec = packing.kernel.spec();
  int maps = 0;
  for (size_t i = 0; i < spec.params.size(); ++i) {
    const ParamSpec& param = spec.params[i];
    if (param.kind == ParamKind::kTensorMap) {
      cuda::TensorMap* map = &arguments->maps[maps++];
      FA4_JAX_RETURN_IF_ERROR(
          EncodeTensorMap(packing.target.driver, spec, param, packing.buffers[param.buffer], map));
      arguments->params[i] = map;
    } else {
      FA4_JAX_RETURN_IF_ERROR(PackSlot(packing, param, &arguments->slots[i]));
      arguments->params[i] = &arguments->slots[i];
    }
  }
  return ffi::Error::Success();
}

ffi::Error ZeroBuffers(const Packing& packing) {
  const KernelSpec& spec = packing.kernel.spec();
  const LaunchTarget& target = packing.target;
  for (int32_t i = spec.num_operands; i < packing.buffers.count; ++i) {
    if (!spec.buffers[i].zeroed) continue;
    const BufferView& buffer = packing.buffers[i];
    size_t count = 1;
    for (const int64_t dim : buffer.dims) count *= dim;
    if (count == 0) continue;
    const cuda::Result result = target.driver.cuMemsetD32Async(
        reinterpret_cast<cuda::DevicePointer>(buffer.data), 0, count, target.stream);
    FA4_JAX_RETURN_IF_ERROR(
        CheckDriver(target.driver, result, Subject(spec, i), "cuMemsetD32Async"));
  }
  return ffi::Error::Success();
}

ffi::Error ComputeGrid(const Packing& packing, uint32_t* grid) {
  const KernelSpec& spec = packing.kernel.spec();
  for (int i = 0; i < 3; ++i) {
    int64_t blocks = EvaluateSize(spec, spec.grid[i], packing.buffers);
    if (i == 0 && spec.persistent) {
      const int64_t clusters = int64_t{packing.kernel.multiprocessors(packing.target.device)} *
                               spec.persistent / spec.cluster[0];
      blocks = std::min(blocks, std::max<int64_t>(clusters, 1) * spec.cluster[0]);
    }
    if (blocks < 0 || blocks > kMaxGrid[i]) {
      return InvalidArgument("kernel " + spec.name, "grid dimension " + std::to_string(i) +
                                                        " would be " + std::to_string(blocks) +
                                                        ", at most " + std::to_string(kMaxGrid[i]));
    }
    grid[i] = static_cast<uint32_t>(blocks);
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error CheckBuffers(const KernelSpec& spec, const Buffers& buffers) {
  for (int32_t i = 0; i < buffers.count; ++i) {
    FA4_JAX_RETURN_IF_ERROR(CheckType(spec, i, buffers[i].dtype));
    if (buffers[i].dims.size() < static_cast<size_t>(spec.buffers[i].min_rank)) {
      return InvalidArgument(Subject(spec, i), "has " + std::to_string(buffers[i].dims.size()) +
                                                   " dimensions, must have at least " +
                                                   std::to_string(spec.buffers[i].min_rank));
    }
  }
  for (int32_t i = spec.num_operands; i < buffers.count; ++i) {
    FA4_JAX_RETURN_IF_ERROR(CheckResultShape(spec, i, buffers));
    const int32_t alias = spec.buffers[i].alias;
    if (alias >= 0 && buffers[alias].data != buffers[i].data) {
      return InvalidArgument(Subject(spec, i), "must share the memory of the operand of its name");
    }
  }
  return ffi::Error::Success();
}

ffi::Error Launch(const Kernel& kernel, const Buffers& buffers, const ffi::Dictionary& attributes,
                  const LaunchTarget& target) {
  const KernelSpec& spec = kernel.spec();
  const Packing packing = {kernel, buffers, attributes, target};
  cuda::LaunchConfig config = {};
  FA4_JAX_RETURN_IF_ERROR(ComputeGrid(packing, config.grid));
  if (config.grid[0] == 0 || config.grid[1] == 0 || config.grid[2] == 0) {
    return ffi::Error::Success();
  }
  Arguments arguments;
  FA4_JAX_RETURN_IF_ERROR(Pack(packing, &arguments));
  FA4_JAX_RETURN_IF_ERROR(ZeroBuffers(packing));

  cuda::LaunchAttribute attributes_of_launch[2] = {};
  config.attributes = attributes_of_launch;
  if (spec.cluster[0] * spec.cluster[1] * spec.cluster[2] > 1) {
    cuda::LaunchAttribute& attribute = config.attributes[config.num_attributes++];
    attribute.id = cuda::kLaunchClusterDimension;
    std::copy(std::begin(spec.cluster), std::end(spec.cluster), attribute.value.cluster);
  }
  if (spec.programmatic) {
    cuda::LaunchAttribute& attribute = config.attributes[config.num_attributes++];
    attribute.id = cuda::kLaunchProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization_allowed = 1;
  }
  std::copy(std::begin(spec.block), std::end(spec.block), config.block);
  config.dynamic_shared_bytes = spec.dynamic_shared_bytes;
  config.stream = target.stream;
  const cuda::Result result = target.driver.cuLaunchKernelEx(
      &config, reinterpret_cast<cuda::Function>(kernel.handle()), arguments.params, nullptr);
  if (result == cuda::kSuccess) return ffi::Error::Success();
  return CheckDriver(target.driver, result, "kernel " + spec.name, "cuLaunchKernelEx");
}

}  // namespace fa4_jax
