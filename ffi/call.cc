#include "call.h"

#include <string>
#include <string_view>

#include "errors.h"
#include "registry.h"

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;

ffi::Error AddKernel(std::string_view name, Call* call) {
  if (call->count == kMaxLaunches) {
    return InvalidArgument(
        "kernel " + std::string(name),
        "is one too many: a call launches at most " + std::to_string(kMaxLaunches));
  }
  Kernel* kernel = FindKernel(name);
  if (kernel == nullptr) {
    return ffi::Error(ffi::ErrorCode::kNotFound,
                      "fa4_jax: kernel " + std::string(name) + " is not in this installation");
  }
  call->kernels[call->count++] = kernel;
  return ffi::Error::Success();
}

// Hands out the buffers of a call.
class Binder {
 public:
  Binder(const Call& call, ffi::RemainingArgs operands, ffi::RemainingRets results,
         std::vector<Buffers>* buffers)
      : call_(call), operands_(operands), results_(results), buffers_(*buffers) {}

  ffi::Error Bind() {
    buffers_.resize(call_.count);
    for (int launch = 0; launch < call_.count; ++launch) {
      const KernelSpec& spec = call_.kernels[launch]->spec();
      for (size_t i = 0; i < spec.buffers.size(); ++i) {
        BufferView view = {};
        FA4_JAX_RETURN_IF_ERROR(Find(launch, static_cast<int32_t>(i), &view));
        buffers_[launch].items[buffers_[launch].count++] = view;
      }
    }
    if (next_operand_ == operands_.size() && next_result_ == results_.size()) {
      return ffi::Error::Success();
    }
    const std::string& name = call_.kernels[0]->spec().name;
    return InvalidArgument("kernel " + name,
                           "called with " + std::to_string(operands_.size()) + " operands and " +
                               std::to_string(results_.size()) + " results, takes " +
                               std::to_string(next_operand_) + " and " +
                               std::to_string(next_result_));
  }

 private:
  // Finds a buffer of a launch: among those of earlier launches, or as the call's next one. Those
  // beyond the call's last one are counted, for the message.
  ffi::Error Find(int launch, int32_t index, BufferView* view) {
    const KernelSpec& spec = call_.kernels[launch]->spec();
    const bool is_operand = index < spec.num_operands;
    const int32_t alias = spec.buffers[index].alias;
    if (is_operand) {
      if (FindEarlier(launch, spec.buffers[index].name, /*only_results=*/false, view)) {
        return ffi::Error::Success();
      }
      return NextOperand(view);
    }
    if (alias >= 0 && FindEarlier(launch, spec.buffers[alias].name, /*only_results=*/true, view)) {
      return ffi::Error::Success();
    }
    return NextResult(view);
  }

  bool FindEarlier(int launch, std::string_view name, bool only_results, BufferView* view) const {
    for (int earlier = launch - 1; earlier >= 0; --earlier) {
      const KernelSpec& spec = call_.kernels[earlier]->spec();
      const int32_t first = only_results ? spec.num_operands : 0;
      for (int32_t i = static_cast<int32_t>(spec.buffers.size()) - 1; i >= first; --i) {
        if (spec.buffers[i].name == name) {
          *view = buffers_[earlier][i];
          return true;
        }
      }
    }
    return false;
  }

  ffi::Error NextOperand(BufferView* view) {
    const size_t index = next_operand_++;
    if (index >= operands_.size()) return ffi::Error::Success();
    ffi::ErrorOr<ffi::AnyBuffer> buffer = operands_.get<ffi::AnyBuffer>(index);
    if (buffer.has_error()) return buffer.error();
    *view = {buffer->untyped_data(), buffer->element_type(), buffer->dimensions()};
    return ffi::Error::Success();
  }

  ffi::Error NextResult(BufferView* view) {
    const size_t index = next_result_++;
    if (index >= results_.size()) return ffi::Error::Success();
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = results_.get<ffi::AnyBuffer>(index);
    if (buffer.has_error()) return buffer.error();
    *view = {(*buffer)->untyped_data(), (*buffer)->element_type(), (*buffer)->dimensions()};
    return ffi::Error::Success();
  }

  const Call& call_;
  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  std::vector<Buffers>& buffers_;
  size_t next_operand_ = 0;
  size_t next_result_ = 0;
};

}  // namespace

ffi::Error ResolveCall(const ffi::Dictionary& attributes, Call* call) {
  ffi::ErrorOr<std::string_view> attribute = attributes.get<std::string_view>("kernel");
  if (attribute.has_error())
    return InvalidArgument("attribute kernel", attribute.error().message());
  std::string_view names = *attribute;
  for (bool is_last = false; !is_last;) {
    const size_t comma = names.find(',');
    is_last = comma == std::string_view::npos;
    FA4_JAX_RETURN_IF_ERROR(AddKernel(names.substr(0, comma), call));
    if (!is_last) names.remove_prefix(comma + 1);
  }
  const std::string subject = "kernel " + std::string(*attribute);
  const cuda::DriverOrError& driver = cuda::GetDriver();
  if (!driver.error.empty()) return FailedPrecondition(subject, driver.error);
  call->driver = &driver.driver;
  const cuda::Result result = driver.driver.cuCtxGetDevice(&call->device);
  if (result != cuda::kSuccess) {
    return CheckDriver(driver.driver, result, subject, "cuCtxGetDevice");
  }
  for (int i = 0; i < call->count; ++i) {
    FA4_JAX_RETURN_IF_ERROR(call->kernels[i]->EnsureReady(driver.driver, call->device));
  }
  return ffi::Error::Success();
}

ffi::Error BindBuffers(const Call& call, ffi::RemainingArgs operands, ffi::RemainingRets results,
                       std::vector<Buffers>* buffers) {
  FA4_JAX_RETURN_IF_ERROR(Binder(call, operands, results, buffers).Bind());
  for (int i = 0; i < call.count; ++i) {
    FA4_JAX_RETURN_IF_ERROR(CheckBuffers(call.kernels[i]->spec(), (*buffers)[i]));
  }
  return ffi::Error::Success();
}

}  // namespace fa4_jax
