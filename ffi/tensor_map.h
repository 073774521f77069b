// TMA descriptors over row-major buffers.
#ifndef FA4_JAX_FFI_TENSOR_MAP_H_
#define FA4_JAX_FFI_TENSOR_MAP_H_

#include "launch.h"

namespace fa4_jax {

// Encodes `param` (a tensor map of `spec`) over `buffer`; elements outside the buffer read as 0.
xla::ffi::Error EncodeTensorMap(const cuda::Driver& driver, const KernelSpec& spec,
                                const ParamSpec& param, const BufferView& buffer,
                                cuda::TensorMap* map);

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_TENSOR_MAP_H_
