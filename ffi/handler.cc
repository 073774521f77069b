// The FFI target fa4_jax_launch: one call launches one or several kernels of the manifest.
//
// Kernels are launched together where a later one may start while the one before it ends. XLA
// records each call as a graph of its own, so as calls of their own they would start later.
//
// It is stateless, because FFI state needs a newer interface than the oldest supported jaxlib has.
// `initialize` runs outside stream capture and loads; `execute` may be captured and only packs and
// launches. The host variant serves JAX's CPU platform, which has no stream and no `initialize`;
// Python registers it when FA4_JAX_LIBCUDA names a stand-in for the driver.
#include <vector>

#include "call.h"
#include "errors.h"
#include "host_memory.h"
#include "launch.h"

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;

ffi::Error Initialize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  Call call;
  return ResolveCall(attributes, &call);
}

ffi::Error Execute(cuda::Stream stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  Call call;
  std::vector<Buffers> buffers;
  FA4_JAX_RETURN_IF_ERROR(ResolveCall(attributes, &call));
  FA4_JAX_RETURN_IF_ERROR(BindBuffers(call, operands, results, &buffers));
  for (int i = 0; i < call.count; ++i) {
    const LaunchTarget target = {*call.driver, call.device, stream};
    FA4_JAX_RETURN_IF_ERROR(Launch(*call.kernels[i], buffers[i], attributes, target));
  }
  return ffi::Error::Success();
}

// The stand-in's launch has ended when it returns: the buffers belong to the host again.
ffi::Error ExecuteOnHost(ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
  Call call;
  std::vector<Buffers> buffers;
  FA4_JAX_RETURN_IF_ERROR(ResolveCall(attributes, &call));
  FA4_JAX_RETURN_IF_ERROR(BindBuffers(call, operands, results, &buffers));
  for (int i = 0; i < call.count; ++i) {
    HostMemory memory(*call.driver);
    FA4_JAX_RETURN_IF_ERROR(memory.Register(call.kernels[i]->spec(), buffers[i]));
    const LaunchTarget target = {*call.driver, call.device, nullptr};
    FA4_JAX_RETURN_IF_ERROR(Launch(*call.kernels[i], buffers[i], attributes, target));
  }
  return ffi::Error::Success();
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
