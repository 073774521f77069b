// All registered kernels, by name.
#ifndef FA4_JAX_FFI_REGISTRY_H_
#define FA4_JAX_FFI_REGISTRY_H_

#include <string_view>
#include <vector>

#include "kernel.h"

namespace fa4_jax {

// Adds kernels; one with the name of an older one replaces it in later calls.
void AddKernels(std::vector<KernelSpec> specs);

// Returns the kernel, or nullptr. It takes no lock.
Kernel* FindKernel(std::string_view name);

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_REGISTRY_H_
