// A stand-in for libcuda that runs nothing and records every launch, for tests on a CPU.
//
// Point FA4_JAX_LIBCUDA at it. Tests steer it and read its log through the mock_cuda_* functions.
// Tensor maps are encoded in the bit layout that drivers use (found by comparing with a driver's
// own output), under the restrictions that the driver documents for its arguments.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../driver_api.h"
#include "launch_log.h"

namespace {

using fa4_jax::LogTriple;
using fa4_jax::cuda::Device;
using fa4_jax::cuda::Function;
using fa4_jax::cuda::Kernel;
using fa4_jax::cuda::LaunchConfig;
using fa4_jax::cuda::Library;
using fa4_jax::cuda::Result;
using fa4_jax::cuda::TensorMap;

constexpr Result kInvalidValue = 1;
constexpr Result kInvalidImage = 200;
constexpr Result kInvalidContext = 201;
constexpr Result kNotFound = 500;

struct State {
  std::mutex mutex;
  std::string log;
  std::map<std::pair<int, int>, int> attributes;   // (device, attribute)
  std::map<std::string, Result> failures;          // by function
  std::map<std::string, std::vector<int>> params;  // bytes of each parameter, by symbol
  std::set<std::string> symbols;                   // node addresses serve as kernel handles
  std::atomic<int> device{0};
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

struct TensorMapArguments {
  int type;
  uint32_t rank;
  const uint64_t* sizes;
  const uint64_t* strides;
  const uint32_t* box;
  int swizzle;
  int l2_promotion;
};

bool Valid(const TensorMapArguments& map, const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0 || map.rank < 1 || map.rank > 5) return false;
  for (uint32_t i = 0; i < map.rank; ++i) {
    if (map.sizes[i] == 0 || map.sizes[i] > uint64_t{1} << 32) return false;
    if (map.box[i] == 0 || map.box[i] > 256) return false;
  }
  for (uint32_t i = 0; i + 1 < map.rank; ++i) {
    if (map.strides[i] % 16 != 0 || map.strides[i] >= uint64_t{1} << 40) return false;
  }
  const uint32_t inner = map.box[0] * (map.type == fa4_jax::cuda::kFloat32 ? 4 : 2);
  return inner % 16 == 0 && (map.swizzle == 0 || inner <= (16u << map.swizzle));
}

uint32_t EncodedType(int type) { return type == fa4_jax::cuda::kBfloat16 ? 10 : type; }

void Encode(const TensorMapArguments& map, void* address, TensorMap* out) {
  std::memset(out, 0, sizeof(*out));
  uint8_t* bytes = reinterpret_cast<uint8_t*>(out);
  uint32_t words[16] = {};
  uint64_t span = map.sizes[0];
  if (map.rank > 1) span = map.sizes[map.rank - 1] * map.strides[map.rank - 2];
  words[2] = (map.rank - 1) << 4 | EncodedType(map.type) << 7 |
             static_cast<uint32_t>(map.swizzle) << 13 |
             static_cast<uint32_t>(map.l2_promotion) << 17 |
             static_cast<uint32_t>(span >= 128 * 1024) << 21;
  for (uint32_t i = 0; i + 1 < map.rank; ++i) {
    words[3 + i] = static_cast<uint32_t>(map.strides[i] / 16);
    words[7] |= static_cast<uint32_t>(map.strides[i] >> 36) << (4 * i);
  }
  for (uint32_t i = 0; i < map.rank; ++i) words[8 + i] = static_cast<uint32_t>(map.sizes[i] - 1);
  std::memcpy(bytes, words, sizeof(words));
  std::memcpy(bytes, &address, sizeof(address));
  for (uint32_t i = 0; i < map.rank; ++i) bytes[55 + i] = static_cast<uint8_t>(map.box[i] - 1);
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
}

// The device that is current on every thread; -1 for none.
void mock_cuda_set_device(int device) { Mock().device = device; }

void mock_cuda_set_attribute(int device, int attribute, int value) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  Mock().attributes[{device, attribute}] = value;
}

void mock_cuda_set_params(const char* symbol, const int* sizes, int count) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  Mock().params[symbol].assign(sizes, sizes + count);
}

// Lets a driver function fail from now on.
void mock_cuda_fail(const char* function, int result) {
  std::lock_guard<std::mutex> lock(Mock().mutex);
  Mock().failures[function] = result;
}

// One JSON object per line. Valid until this thread's next call.
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
  const TensorMapArguments arguments = {type, rank,    sizes,       byte_strides,
                                        box,  swizzle, l2_promotion};
  if (!Valid(arguments, address)) return kInvalidValue;
  Encode(arguments, address, map);
  return 0;
}

Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** params, void**) {
  if (Result result = Failure("cuLaunchKernelEx")) return result;
  const std::string& symbol = *reinterpret_cast<const std::string*>(function);
  const uint32_t none[3] = {1, 1, 1};
  const bool clustered = config->num_attributes > 0 &&
                         config->attributes[0].id == fa4_jax::cuda::kLaunchClusterDimension;
  const uint32_t* cluster = clustered ? config->attributes[0].value.cluster : none;
  Log("{\"event\": \"launch\", \"symbol\": \"" + symbol +
      "\", \"grid\": " + LogTriple(config->grid) + ", \"block\": " + LogTriple(config->block) +
      ", \"cluster\": " + LogTriple(cluster) +
      ", \"smem\": " + std::to_string(config->dynamic_shared_bytes) +
      ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(config->stream)) +
      ", \"device\": " + std::to_string(Mock().device) + ", \"params\": " + Params(symbol, params) +
      "}");
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
