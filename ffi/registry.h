// All registered kernels, by name.
#ifndef FA4_JAX_FFI_REGISTRY_H_
#define FA4_JAX_FFI_REGISTRY_H_

#include <string_view>
#include <vector>

#include "kernel.h"

namespace fa4_jax {

// Adds kernels; one that has the name of an older one takes its place for later calls.
void AddKernels(std::vector<KernelSpec> specs);

// The kernel, or nullptr. Takes no lock.
Kernel* FindKernel(std::string_view name);

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_REGISTRY_H_
