// The functions that CuTe-DSL's exported host code calls; they record its launch instead of running
// it.
//
// Linked with a kernel's host object, or loaded before it; the log has the form of
// ffi/testing/mock_cuda.cc's.
#include <cstdint>
#include <string>
#include <vector>

#include "../../ffi/testing/launch_log.h"

namespace {

using fa4_jax::LogTriple;

struct Attribute {
  int id;
  int padding;
  uint32_t value[16];
};

struct Config {
  uint32_t grid[3];
  uint32_t block[3];
  uint64_t dynamic_shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t num_attributes;
};

constexpr int kClusterDimension = 4;
constexpr int kProgrammaticStreamSerialization = 6;
constexpr int kMaxSharedBytesOptin = 97;

std::string launch_log;
std::string kernel_symbol;
std::vector<int> param_bytes;

}  // namespace

extern "C" {

void shim_set_params(const int* sizes, int count) { param_bytes.assign(sizes, sizes + count); }
const char* shim_log() { return launch_log.c_str(); }

int _cudaLibraryLoadData(void** library, const void* image, void*, void*, int, void*, void*, int) {
  *library = const_cast<void*>(image);
  return 0;
}

int _cudaLibraryGetKernel(void** kernel, void*, const char* symbol) {
  kernel_symbol = symbol;
  *kernel = &kernel_symbol;
  return 0;
}

int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}

int _cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == kMaxSharedBytesOptin ? 232448 : 0;
  return 0;
}

int _cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return 0;
}

int _cudaFuncSetAttribute(void*, int, int) { return 0; }

int _cudaKernelSetAttributeForDevice(void*, int, int, int) { return 0; }

int _cudaLaunchKernelEx(const Config* config, void*, void** params) {
  uint32_t cluster[3] = {1, 1, 1};
  uint32_t programmatic = 0;
  for (uint32_t i = 0; i < config->num_attributes; ++i) {
    const auto& attribute = config->attributes[i];
    if (attribute.id == kProgrammaticStreamSerialization) programmatic = attribute.value[0];
    if (attribute.id != kClusterDimension) continue;
    for (int axis = 0; axis < 3; ++axis) cluster[axis] = attribute.value[axis];
  }
  launch_log = "{\"symbol\": \"" + kernel_symbol + "\", \"grid\": " + LogTriple(config->grid) +
               ", \"block\": " + LogTriple(config->block) + ", \"cluster\": " + LogTriple(cluster) +
               ", \"programmatic\": " + std::to_string(programmatic) +
               ", \"smem\": " + std::to_string(config->dynamic_shared_bytes) +
               ", \"params\": " + fa4_jax::LogParams(param_bytes, params) + "}";
  return 0;
}

}  // extern "C"
