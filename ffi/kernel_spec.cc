// KernelRecord -> KernelSpec, with every index checked once so that launches need not.
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

// Collects what is wrong with a record; the first complaint wins.
class Checker {
 public:
  explicit Checker(const KernelRecord& record) : record_(record) {}

  void Require(bool condition, const std::string& what) {
    if (!condition && what_.empty()) what_ = what;
  }
  bool BufferExists(int32_t buffer) const {
    return 0 <= buffer && buffer < record_.num_operands + record_.num_results;
  }
  const std::string& what() const { return what_; }

 private:
  const KernelRecord& record_;
  std::string what_;
};

void CheckCounts(const KernelRecord& record, Checker* check) {
  check->Require(record.num_operands + record.num_results <= kMaxBuffers, "too many buffers");
  check->Require(record.num_params <= kMaxParams, "too many parameters");
  check->Require(std::string_view(record.arch).substr(0, 3) == "sm_" &&
                     std::string_view(record.arch).size() >= 6,
                 std::string("unknown architecture ") + record.arch);
  check->Require(ReadType(record.dtype).has_value(), std::string("unknown type ") + record.dtype);
  check->Require(record.cluster[0] > 0 && record.cluster[1] > 0 && record.cluster[2] > 0,
                 "a cluster dimension is 0");
  for (const Range& size : record.grid) {
    check->Require(Within(size, record.num_factors), "a grid size is out of range");
  }
  for (int i = 0; i < record.num_sizes; ++i) {
    check->Require(Within(record.sizes[i], record.num_factors), "a shape is out of range");
  }
}

// Every axis that a size or parameter reads must exist in the buffer.
void ReadFactors(const KernelRecord& record, Checker* check, KernelSpec* spec) {
  spec->factors.assign(record.factors, record.factors + record.num_factors);
  for (const FactorRecord& factor : spec->factors) {
    if (factor.buffer < 0) continue;
    bool known = check->BufferExists(factor.buffer);
    check->Require(known && factor.axis >= 0 && factor.divisor > 0, "a size is out of range");
    if (!known) continue;
    int32_t& rank = spec->buffers[factor.buffer].min_rank;
    rank = std::max(rank, factor.axis + 1);
  }
}

void ReadBuffers(const KernelRecord& record, Checker* check, KernelSpec* spec) {
  for (int i = 0; i < record.num_operands + record.num_results; ++i) {
    const BufferRecord& buffer = record.buffers[i];
    std::optional<ffi::DataType> dtype = ReadType(buffer.dtype);
    check->Require(dtype.has_value() || *buffer.dtype == '\0',
                   std::string(buffer.name) + " has unknown type " + buffer.dtype);
    check->Require(buffer.alias < record.num_operands, "an alias is out of range");
    check->Require(Within(buffer.shape, record.num_sizes), "a shape is out of range");
    spec->buffers.push_back({buffer.name, dtype, buffer.alias, buffer.shape, 0});
  }
}

void ReadParams(const KernelRecord& record, Checker* check, KernelSpec* spec) {
  int tensor_maps = 0;
  for (int i = 0; i < record.num_params; ++i) {
    const ParamRecord& param = record.params[i];
    ParamSpec copy = {param.name,
                      static_cast<ParamKind>(param.kind),
                      param.buffer,
                      param.rank,
                      param.swizzle_bytes,
                      {},
                      {},
                      param.size};
    std::copy(std::begin(param.axes), std::end(param.axes), copy.axes.begin());
    std::copy(std::begin(param.box), std::end(param.box), copy.box.begin());
    const bool reads_buffer = copy.kind == ParamKind::kTensorMap ||
                              copy.kind == ParamKind::kPointer || copy.kind == ParamKind::kDim;
    const bool known = check->BufferExists(copy.buffer) && 0 <= copy.rank && copy.rank <= 5;
    check->Require(!reads_buffer || known, "parameter " + copy.name + " is out of range");
    check->Require(Within(copy.size, record.num_factors),
                   "parameter " + copy.name + " is out of range");
    for (int a = 0; reads_buffer && known && a < copy.rank; ++a) {
      check->Require(copy.axes[a] >= 0, "parameter " + copy.name + " has a negative axis");
      int32_t& rank = spec->buffers[copy.buffer].min_rank;
      rank = std::max(rank, copy.axes[a] + 1);
    }
    tensor_maps += copy.kind == ParamKind::kTensorMap;
    spec->params.push_back(std::move(copy));
  }
  check->Require(tensor_maps <= kMaxTensorMaps, "too many tensor maps");
}

}  // namespace

ffi::ErrorOr<KernelSpec> ReadRecord(const KernelRecord& record) {
  Checker check(record);
  CheckCounts(record, &check);
  KernelSpec spec;
  spec.name = record.name;
  spec.arch = record.arch;
  spec.dtype = ReadType(record.dtype).value_or(spec.dtype);
  spec.file = record.file;
  spec.sha256 = record.sha256;
  spec.symbol = record.symbol;
  ReadBuffers(record, &check, &spec);
  ReadFactors(record, &check, &spec);
  ReadParams(record, &check, &spec);
  spec.sizes.assign(record.sizes, record.sizes + record.num_sizes);
  spec.num_operands = record.num_operands;
  spec.dynamic_shared_bytes = record.dynamic_shared_bytes;
  spec.persistent = record.persistent != 0;
  for (int i = 0; i < 3; ++i) {
    spec.block[i] = record.block[i];
    spec.cluster[i] = record.cluster[i];
    spec.grid[i] = record.grid[i];
  }
  if (!check.what().empty()) {
    return ffi::Unexpected(
        InvalidArgument(std::string("manifest record of kernel ") + record.name, check.what()));
  }
  return spec;
}

}  // namespace fa4_jax
