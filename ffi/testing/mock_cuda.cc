// A stand-in for libcuda that runs nothing and records every launch, for tests on a CPU.
//
// Point FA4_JAX_LIBCUDA at it. Tests steer it and read its log through the mock_cuda_* functions.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../driver_api.h"
#include "encode_tensor_map.h"
#include "launch_log.h"

namespace {

using fa4_jax::LogTriple;
using fa4_jax::cuda::Device;
using fa4_jax::cuda::DevicePointer;
using fa4_jax::cuda::Function;
using fa4_jax::cuda::Kernel;
using fa4_jax::cuda::LaunchConfig;
using fa4_jax::cuda::Library;
using fa4_jax::cuda::Result;
using fa4_jax::cuda::Stream;
using fa4_jax::cuda::TensorMap;

constexpr Result kInvalidValue = 1;
constexpr Result kInvalidImage = 200;
constexpr Result kInvalidContext = 201;
constexpr Result kNotFound = 500;

constexpr int kNewestCuda = 13000;

struct State {
  std::mutex mutex;
  std::string log;
  std::map<std::pair<int, int>, int> attributes;   // (device, attribute)
  std::map<std::string, Result> failures;          // by function
  std::map<std::string, std::vector<int>> params;  // bytes of each parameter, by symbol
  std::set<std::string> symbols;                   // node addresses serve as kernel handles
  std::atomic<int> device{0};
  std::atomic<int> cuda_version{kNewestCuda};
};

State& Mock() {
  static State* const state = new State;
  return *state;
}

Result Failure(const char* function) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  auto found = Mock().failures.find(function);
  return found == Mock().failures.end() ? fa4_jax::cuda::kSuccess : found->second;
}

void Log(const std::string& event) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  Mock().log += event + "\n";
}

std::string Params(const std::string& symbol, void** params) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  return fa4_jax::LogParams(Mock().params[symbol], params);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void mock_cuda_reset() {
  State& mock = Mock();
  std::lock_guard<std::mutex> lock(mock.mutex);
  mock.log.clear();
  mock.failures.clear();
  mock.attributes.clear();
  mock.device = 0;
  mock.cuda_version = kNewestCuda;
}

// Sets the device that is current on every thread; -1 is none.
void mock_cuda_set_device(int device) { Mock().device = device; }

// Sets the driver's CUDA version, 1000 * major + 10 * minor.
void mock_cuda_set_cuda_version(int version) { Mock().cuda_version = version; }

void mock_cuda_set_attribute(int device, int attribute, int value) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  Mock().attributes[{device, attribute}] = value;
}

void mock_cuda_set_params(const char* symbol, const int* sizes, int count) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  Mock().params[symbol].assign(sizes, sizes + count);
}

// Makes a driver function fail from now on.
void mock_cuda_fail(const char* function, int result) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  Mock().failures[function] = result;
}

// Returns the log, with one JSON object per line. It is valid until this thread's next call.
const char* mock_cuda_log() {
  static thread_local std::string copy;
  std::lock_guard<std::mutex> lock(Mock().mutex);
  copy = Mock().log;
  return copy.c_str();
}

Result cuGetErrorName(Result, const char** name) {
  *name = "CUDA_ERROR_MOCK";
  return 0;
}

Result cuGetErrorString(Result, const char** text) {
  *text = "as the test asked";
  return 0;
}

Result cuDriverGetVersion(int* version) {
  *version = Mock().cuda_version;
  return Failure("cuDriverGetVersion");
}

Result cuCtxGetDevice(Device* device) {
  *device = Mock().device;
  return *device < 0 ? kInvalidContext : Failure("cuCtxGetDevice");
}

Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  static const std::map<int, int> hopper = {{fa4_jax::cuda::kDeviceMultiprocessorCount, 132},
                                            {fa4_jax::cuda::kDeviceComputeCapabilityMajor, 9},
                                            {fa4_jax::cuda::kDeviceComputeCapabilityMinor, 0}};
  auto set = Mock().attributes.find({device, attribute});
  auto usual = hopper.find(attribute);
  if (set == Mock().attributes.end() && usual == hopper.end()) return kInvalidValue;
  *value = set != Mock().attributes.end() ? set->second : usual->second;
  return 0;
}

Result cuLibraryLoadData(Library* library, const void* image, int*, void**, unsigned, int*, void**,
                         unsigned) {
  if (Result result = Failure("cuLibraryLoadData")) return result;
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) != 0)
    return kInvalidImage;
  static std::atomic<uintptr_t> count{0};
  *library = reinterpret_cast<Library>(++count);
  Log("{\"event\": \"load\"}");
  return 0;
}

Result cuLibraryGetKernel(Kernel* kernel, Library, const char* symbol) {
  if (Result result = Failure("cuLibraryGetKernel")) return result;
  std::lock_guard<std::mutex> lock(Mock().mutex);
  if (Mock().params.count(symbol) == 0) return kNotFound;
  const std::string& kept = *Mock().symbols.insert(symbol).first;
  *kernel = reinterpret_cast<Kernel>(const_cast<std::string*>(&kept));
  return 0;
}

Result cuKernelGetFunction(Function* function, Kernel kernel) {
  *function = reinterpret_cast<Function>(kernel);
  return Failure("cuKernelGetFunction");
}

Result cuKernelSetAttribute(int attribute, int value, Kernel, Device device) {
  if (Result result = Failure("cuKernelSetAttribute")) return result;
  Log("{\"event\": \"attribute\", \"attribute\": " + std::to_string(attribute) +
      ", \"value\": " + std::to_string(value) + ", \"device\": " + std::to_string(device) + "}");
  return 0;
}

Result cuTensorMapEncodeTiled(TensorMap* map, int type, uint32_t rank, void* address,
                              const uint64_t* sizes, const uint64_t* byte_strides,
                              const uint32_t* box, const uint32_t*, int, int swizzle,
                              int l2_promotion, int) {
  if (Result result = Failure("cuTensorMapEncodeTiled")) return result;
  const fa4_jax::TensorMapArguments arguments = {type,         rank, address, sizes,
                                                 byte_strides, box,  swizzle, l2_promotion};
  if (!fa4_jax::Valid(arguments)) return kInvalidValue;
  fa4_jax::Encode(arguments, map);
  return 0;
}

Result cuMemsetD32Async(DevicePointer address, uint32_t value, size_t count, Stream stream) {
  if (Result result = Failure("cuMemsetD32Async")) return result;
  Log("{\"event\": \"memset\", \"address\": " + std::to_string(address) +
      ", \"value\": " + std::to_string(value) + ", \"count\": " + std::to_string(count) +
      ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(stream)) + "}");
  return 0;
}

Result cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  if (Result result = Failure("cuMemHostRegister_v2")) return result;
  Log("{\"event\": \"register\", \"address\": " +
      std::to_string(reinterpret_cast<uintptr_t>(address)) +
      ", \"bytes\": " + std::to_string(bytes) + ", \"flags\": " + std::to_string(flags) + "}");
  return 0;
}

Result cuMemHostUnregister(void* address) {
  if (Result result = Failure("cuMemHostUnregister")) return result;
  Log("{\"event\": \"unregister\", \"address\": " +
      std::to_string(reinterpret_cast<uintptr_t>(address)) + "}");
  return 0;
}

Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** params, void**) {
  if (Result result = Failure("cuLaunchKernelEx")) return result;
  const std::string& symbol = *reinterpret_cast<const std::string*>(function);
  uint32_t cluster[3] = {1, 1, 1};
  int programmatic = 0;
  for (uint32_t i = 0; i < config->num_attributes; ++i) {
    const fa4_jax::cuda::LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == fa4_jax::cuda::kLaunchClusterDimension) {
      std::copy(attribute.value.cluster, attribute.value.cluster + 3, cluster);
    } else if (attribute.id == fa4_jax::cuda::kLaunchProgrammaticStreamSerialization) {
      programmatic = attribute.value.programmatic_stream_serialization_allowed;
    } else {
      return 1;
    }
  }
  Log("{\"event\": \"launch\", \"symbol\": \"" + symbol +
      "\", \"grid\": " + LogTriple(config->grid) + ", \"block\": " + LogTriple(config->block) +
      ", \"cluster\": " + LogTriple(cluster) + ", \"programmatic\": " +
      std::to_string(programmatic) + ", \"smem\": " + std::to_string(config->dynamic_shared_bytes) +
      ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(config->stream)) +
      ", \"device\": " + std::to_string(Mock().device) + ", \"params\": " + Params(symbol, params) +
      "}");
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
