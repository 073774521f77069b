// Makes KernelSpecs from records, with every index checked once so that launches need not.
#include <algorithm>
#include <string_view>

#include "errors.h"
#include "kernel.h"

namespace fa4_jax {

namespace ffi = xla::ffi;

namespace {

std::optional<ffi::DataType> ReadType(std::string_view name) {
  if (name == "bf16") return ffi::BF16;
  if (name == "fp16") return ffi::F16;
  if (name == "f32") return ffi::F32;
  if (name == "i32") return ffi::S32;
  return std::nullopt;
}

bool Within(Range range, int32_t size) {
  return 0 <= range.begin && range.begin <= range.end && range.end <= size;
}

// Reads one kernel's records. The first error wins; after one, nothing more is read.
class Reader {
 public:
  Reader(const Records& records, const KernelRecord& record,
         std::shared_ptr<const SizeTables> tables)
      : records_(records), record_(record) {
    spec_.tables = std::move(tables);
  }

  ffi::ErrorOr<KernelSpec> Read() {
    ReadStrings();
    ReadGeometry();
    if (complaint_.empty()) ReadBuffers();
    if (complaint_.empty()) ReadParams();
    for (const Range& size : record_.grid) ReadSize(size);
    if (complaint_.empty()) return std::move(spec_);
    return ffi::Unexpected(InvalidArgument("manifest record of kernel " + spec_.name, complaint_));
  }

 private:
  bool Require(bool condition, const std::string& complaint) {
    if (!condition && complaint_.empty()) complaint_ = complaint;
    return condition;
  }

  std::string String(int32_t offset) {
    if (!Require(0 <= offset && offset < records_.num_string_bytes, "a name is out of range")) {
      return "";
    }
    return records_.strings + offset;
  }

  void ReadStrings() {
    spec_.name = String(record_.name);
    spec_.arch = String(record_.arch);
    spec_.file = String(record_.file);
    spec_.sha256 = String(record_.sha256);
    spec_.symbol = String(record_.symbol);
    const std::string dtype = String(record_.dtype);
    const std::optional<ffi::DataType> type = ReadType(dtype);
    Require(type.has_value(), "unknown type " + dtype);
    spec_.dtype = type.value_or(spec_.dtype);
    Require(spec_.arch.size() >= 6 && spec_.arch.substr(0, 3) == "sm_",
            "unknown architecture " + spec_.arch);
  }

  void ReadGeometry() {
    for (int i = 0; i < 3; ++i) {
      spec_.block[i] = record_.block[i];
      spec_.cluster[i] = record_.cluster[i];
      spec_.grid[i] = record_.grid[i];
      Require(record_.cluster[i] > 0, "a cluster dimension is 0");
    }
    spec_.dynamic_shared_bytes = record_.dynamic_shared_bytes;
    spec_.persistent = record_.persistent;
    spec_.programmatic = record_.programmatic != 0;
    spec_.num_operands = record_.num_operands;
    Require(Within(record_.buffers, records_.num_buffers), "its buffers are out of range");
    Require(Within(record_.params, records_.num_params), "its parameters are out of range");
    const int32_t num_buffers = record_.buffers.end - record_.buffers.begin;
    Require(num_buffers <= kMaxBuffers, "too many buffers");
    Require(0 <= record_.num_operands && record_.num_operands <= num_buffers,
            "its operands are out of range");
    Require(record_.params.end - record_.params.begin <= kMaxParams, "too many parameters");
  }

  void ReadBuffers() {
    for (int i = record_.buffers.begin; i < record_.buffers.end; ++i) {
      const BufferRecord& buffer = records_.buffers[i];
      const std::string dtype = String(buffer.dtype);
      const std::optional<ffi::DataType> type = ReadType(dtype);
      Require(type.has_value() || dtype.empty(), "unknown type " + dtype);
      Require(buffer.alias < record_.num_operands, "an alias is out of range");
      Require(Within(buffer.shape, records_.num_sizes), "a shape is out of range");
      const bool words = type == ffi::F32 || type == ffi::S32;
      Require(buffer.zeroed == 0 || words, "a buffer to be zeroed is neither f32 nor i32");
      spec_.buffers.push_back(
          {String(buffer.name), type, buffer.alias, buffer.shape, buffer.zeroed != 0, 0});
    }
    if (!complaint_.empty()) return;
    for (size_t i = record_.num_operands; i < spec_.buffers.size(); ++i) {
      const Range shape = spec_.buffers[i].shape;
      for (int32_t axis = shape.begin; axis < shape.end; ++axis) ReadSize(records_.sizes[axis]);
    }
  }

  // A size or parameter reads `axis`, so the buffer must have it.
  void UseAxis(int32_t buffer, int32_t axis) {
    const int32_t count = static_cast<int32_t>(spec_.buffers.size());
    if (!Require(0 <= buffer && buffer < count && axis >= 0, "an axis is out of range")) return;
    int32_t& rank = spec_.buffers[buffer].min_rank;
    rank = std::max(rank, axis + 1);
  }

  void ReadSize(Range size) {
    if (!Require(Within(size, records_.num_factors), "a size is out of range")) return;
    for (int32_t i = size.begin; i < size.end; ++i) {
      const FactorRecord& factor = records_.factors[i];
      if (factor.buffer < 0) continue;
      UseAxis(factor.buffer, factor.axis);
      Require(factor.divisor > 0, "a size is divided by 0");
    }
  }

  void ReadParams() {
    int tensor_maps = 0;
    for (int i = record_.params.begin; i < record_.params.end; ++i) {
      const ParamRecord& param = records_.params[i];
      ParamSpec copy = {String(param.name),
                        static_cast<ParamKind>(param.kind),
                        param.buffer,
                        param.rank,
                        param.swizzle_bytes,
                        {},
                        {},
                        param.size};
      std::copy(std::begin(param.axes), std::end(param.axes), copy.axes.begin());
      std::copy(std::begin(param.box), std::end(param.box), copy.box.begin());
      ReadParam(copy);
      tensor_maps += copy.kind == ParamKind::kTensorMap;
      spec_.params.push_back(std::move(copy));
    }
    Require(tensor_maps <= kMaxTensorMaps, "too many tensor maps");
  }

  void ReadParam(const ParamSpec& param) {
    ReadSize(param.size);
    const bool of_buffer = param.kind == ParamKind::kTensorMap ||
                           param.kind == ParamKind::kPointer || param.kind == ParamKind::kDim;
    if (!of_buffer) return;
    const bool ranked = param.kind == ParamKind::kPointer || (1 <= param.rank && param.rank <= 5);
    const int32_t count = static_cast<int32_t>(spec_.buffers.size());
    if (!Require(ranked && 0 <= param.buffer && param.buffer < count,
                 "parameter " + param.name + " is out of range")) {
      return;
    }
    for (int axis = 0; axis < param.rank; ++axis) UseAxis(param.buffer, param.axes[axis]);
  }

  const Records& records_;
  const KernelRecord& record_;
  KernelSpec spec_;
  std::string complaint_;
};

}  // namespace

ffi::ErrorOr<std::vector<KernelSpec>> ReadRecords(const Records& records) {
  auto tables = std::make_shared<SizeTables>();
  tables->sizes.assign(records.sizes, records.sizes + records.num_sizes);
  tables->factors.assign(records.factors, records.factors + records.num_factors);
  std::vector<KernelSpec> specs;
  specs.reserve(records.num_kernels);
  for (int32_t i = 0; i < records.num_kernels; ++i) {
    ffi::ErrorOr<KernelSpec> spec = Reader(records, records.kernels[i], tables).Read();
    if (spec.has_error()) return ffi::Unexpected(spec.error());
    specs.push_back(std::move(*spec));
  }
  return specs;
}

}  // namespace fa4_jax
