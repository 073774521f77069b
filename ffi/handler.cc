// The FFI target fa4_jax_launch: one call launches one kernel of the manifest.
//
// It is stateless, because FFI state needs a newer interface than the oldest supported jaxlib has.
// `initialize` runs outside stream capture and loads; `execute` may be captured and only packs and
// launches. The host variant serves JAX's CPU platform, which has no stream and no `initialize`;
// Python registers it when FA4_JAX_LIBCUDA names a stand-in for the driver.
#include <string>
#include <string_view>

#include "errors.h"
#include "host_memory.h"
#include "launch.h"
#include "registry.h"

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;

struct Call {
  Kernel* kernel;
  const cuda::Driver* driver;
  cuda::Device device;
};

// Resolves the call's kernel and makes it launchable on the current device.
ffi::Error Resolve(const ffi::Dictionary& attributes, Call* call) {
  ffi::ErrorOr<std::string_view> name = attributes.get<std::string_view>("kernel");
  if (name.has_error()) return InvalidArgument("attribute kernel", name.error().message());
  call->kernel = FindKernel(*name);
  if (call->kernel == nullptr) {
    return xla::ffi::Error(ffi::ErrorCode::kNotFound, "fa4_jax: kernel " + std::string(*name) +
                                                          " is not in this installation");
  }
  const cuda::DriverOrError& driver = cuda::GetDriver();
  if (!driver.error.empty()) {
    return FailedPrecondition("kernel " + std::string(*name), driver.error);
  }
  call->driver = &driver.driver;
  const cuda::Result result = driver.driver.cuCtxGetDevice(&call->device);
  if (result != cuda::kSuccess) {
    return CheckDriver(driver.driver, result, "kernel " + std::string(*name), "cuCtxGetDevice");
  }
  return call->kernel->EnsureReady(driver.driver, call->device);
}

ffi::Error CollectBuffers(const KernelSpec& spec, ffi::RemainingArgs operands,
                          ffi::RemainingRets results, Buffers* buffers) {
  const size_t num_results = spec.buffers.size() - spec.num_operands;
  if (operands.size() != static_cast<size_t>(spec.num_operands) || results.size() != num_results) {
    return InvalidArgument("kernel " + spec.name,
                           "called with " + std::to_string(operands.size()) + " operands and " +
                               std::to_string(results.size()) + " results, takes " +
                               std::to_string(spec.num_operands) + " and " +
                               std::to_string(num_results));
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> buffer = operands.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers->items[buffers->count++] = {buffer->untyped_data(), buffer->element_type(),
                                        buffer->dimensions()};
  }
  for (size_t i = 0; i < results.size(); ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = results.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers->items[buffers->count++] = {(*buffer)->untyped_data(), (*buffer)->element_type(),
                                        (*buffer)->dimensions()};
  }
  return ffi::Error::Success();
}

ffi::Error Initialize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  Call call;
  return Resolve(attributes, &call);
}

// Does what both variants do before they launch.
ffi::Error Prepare(ffi::RemainingArgs operands, ffi::RemainingRets results,
                   const ffi::Dictionary& attributes, Call* call, Buffers* buffers) {
  FA4_JAX_RETURN_IF_ERROR(Resolve(attributes, call));
  FA4_JAX_RETURN_IF_ERROR(CollectBuffers(call->kernel->spec(), operands, results, buffers));
  return CheckBuffers(call->kernel->spec(), *buffers);
}

ffi::Error Execute(cuda::Stream stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  Call call;
  Buffers buffers;
  FA4_JAX_RETURN_IF_ERROR(Prepare(operands, results, attributes, &call, &buffers));
  return Launch(*call.kernel, buffers, attributes, {*call.driver, call.device, stream});
}

// The stand-in's launch has ended when it returns: the buffers belong to the host again.
ffi::Error ExecuteOnHost(ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
  Call call;
  Buffers buffers;
  FA4_JAX_RETURN_IF_ERROR(Prepare(operands, results, attributes, &call, &buffers));
  HostMemory memory(*call.driver);
  FA4_JAX_RETURN_IF_ERROR(memory.Register(call.kernel->spec(), buffers));
  return Launch(*call.kernel, buffers, attributes, {*call.driver, call.device, nullptr});
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    fa4_jax_initialize, Initialize,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(fa4_jax_execute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(fa4_jax_execute_on_host, ExecuteOnHost,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
#pragma GCC visibility pop

}  // namespace fa4_jax
