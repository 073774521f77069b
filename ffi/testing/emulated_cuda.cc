// A stand-in for libcuda that runs kernels: their PTX, on the emulator, on JAX's CPU buffers.
//
// Point FA4_JAX_LIBCUDA at it, and FA4_JAX_KERNELS at a folder that `python -m kernels.build --ptx`
// filled. What a driver does beyond keeping records is done in Python, by
// kernels/emulator/driver: this library imports that package, which attaches its functions. A
// launch has ended when cuLaunchKernelEx returns; it may touch the memory that its thread has
// registered, nothing else.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../driver_api.h"
#include "encode_tensor_map.h"

namespace {

using fa4_jax::cuda::Device;
using fa4_jax::cuda::DevicePointer;
using fa4_jax::cuda::Function;
using fa4_jax::cuda::Kernel;
using fa4_jax::cuda::kSuccess;
using fa4_jax::cuda::LaunchAttribute;
using fa4_jax::cuda::LaunchConfig;
using fa4_jax::cuda::Library;
using fa4_jax::cuda::Result;
using fa4_jax::cuda::Stream;
using fa4_jax::cuda::TensorMap;

constexpr Result kInvalidValue = 1;
constexpr Result kNotInitialized = 3;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidImage = 200;
constexpr Result kAlreadyRegistered = 712;
constexpr Result kNotRegistered = 713;
constexpr Result kNotSupported = 801;

constexpr int kCudaVersion = 12090;                  // of the tools that compile our kernels
constexpr int kUsualDynamicSharedBytes = 48 * 1024;  // the most before cuKernelSetAttribute

const std::map<Result, const char*>& Names() {
  static const auto* const names = new std::map<Result, const char*>{
      {1, "CUDA_ERROR_INVALID_VALUE"},
      {3, "CUDA_ERROR_NOT_INITIALIZED"},
      {101, "CUDA_ERROR_INVALID_DEVICE"},
      {200, "CUDA_ERROR_INVALID_IMAGE"},
      {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {218, "CUDA_ERROR_INVALID_PTX"},
      {500, "CUDA_ERROR_NOT_FOUND"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {702, "CUDA_ERROR_LAUNCH_TIMEOUT"},
      {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
      {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"},
      {716, "CUDA_ERROR_MISALIGNED_ADDRESS"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"},
      {801, "CUDA_ERROR_NOT_SUPPORTED"},
      {999, "CUDA_ERROR_UNKNOWN"},
  };
  return *names;
}

struct Range {
  uint64_t address;
  uint64_t bytes;
  int32_t read_only;
  int32_t set;  // cuMemsetD32Async has written all of it
};

// kernels/emulator/driver/driver.py restates this and Emulator.
struct Launch {
  const char* image;
  const char* symbol;
  void* const* params;
  const Range* ranges;
  int32_t num_ranges;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster[3];
  uint32_t dynamic_shared_bytes;
};

// Functions of kernels/emulator/driver. Each returns a CUresult and explains an error.
struct Emulator {
  Result (*attribute)(int attribute, int* value);
  Result (*prepare)(const char* image, const char* symbol);
  Result (*launch)(const Launch* launch);
};

struct LoadedLibrary;

struct LoadedKernel {
  std::string symbol;
  const LoadedLibrary* library;
  std::atomic<int> most_dynamic_shared_bytes{kUsualDynamicSharedBytes};
};

struct LoadedLibrary {
  std::string image;
  std::mutex mutex;
  std::map<std::string, LoadedKernel> kernels;
};

std::atomic<const Emulator*> attached{nullptr};
thread_local std::string explanation;
thread_local std::vector<Range> registered;

Result Fail(Result result, const std::string& why) {
  explanation = why;
  return result;
}

// Lets this process's Python import the module that attaches itself.
void ImportPython() {
  const auto find = [](const char* name) { return dlsym(RTLD_DEFAULT, name); };
  const auto ensure = reinterpret_cast<int (*)()>(find("PyGILState_Ensure"));
  const auto release = reinterpret_cast<void (*)(int)>(find("PyGILState_Release"));
  const auto import = reinterpret_cast<void* (*)(const char*)>(find("PyImport_ImportModule"));
  const auto print = reinterpret_cast<void (*)()>(find("PyErr_Print"));
  if (ensure == nullptr || release == nullptr || import == nullptr || print == nullptr) return;
  const int state = ensure();
  if (import("kernels.emulator.driver") == nullptr) print();
  release(state);
}

// Calls the emulator under the floating-point environment that it expects: XLA's threads flush
// denormal numbers.
template <typename Call>
Result Ask(Call call) {
  if (attached.load() == nullptr) ImportPython();
  const Emulator* emulator = attached.load();
  if (emulator == nullptr) {
    return Fail(kNotInitialized,
                "Python cannot import kernels.emulator.driver, which runs kernels");
  }
  std::fenv_t environment;
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  const Result result = call(*emulator);
  std::fesetenv(&environment);
  return result;
}

bool Overlap(const Range& a, uint64_t address, uint64_t bytes) {
  return a.address < address + bytes && address < a.address + a.bytes;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Makes these functions the ones that run kernels. They must outlive the process's launches.
void emulated_cuda_attach(const Emulator* emulator) { attached.store(emulator); }

// Sets what cuGetErrorString will say to this thread.
void emulated_cuda_explain(const char* text) { explanation = text; }

Result cuGetErrorName(Result result, const char** name) {
  const auto found = Names().find(result);
  if (found == Names().end()) return kInvalidValue;
  *name = found->second;
  return kSuccess;
}

Result cuGetErrorString(Result, const char** text) {
  *text = explanation.c_str();
  return kSuccess;
}

Result cuCtxGetDevice(Device* device) {
  *device = 0;
  return kSuccess;
}

Result cuDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  if (device != 0) return Fail(kInvalidDevice, "there is one emulated device, number 0");
  return Ask([=](const Emulator& emulator) { return emulator.attribute(attribute, value); });
}

Result cuLibraryLoadData(Library* library, const void* image, int*, void**, unsigned, int*, void**,
                         unsigned) {
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) == 0) {
    return Fail(kInvalidImage,
                "a cubin cannot be emulated: FA4_JAX_KERNELS must name a folder that "
                "`python -m kernels.build --ptx` filled");
  }
  auto* const loaded = new LoadedLibrary;
  loaded->image = static_cast<const char*>(image);
  *library = reinterpret_cast<Library>(loaded);
  return kSuccess;
}

Result cuLibraryGetKernel(Kernel* kernel, Library library, const char* symbol) {
  auto* const loaded = reinterpret_cast<LoadedLibrary*>(library);
  const Result result = Ask(
      [=](const Emulator& emulator) { return emulator.prepare(loaded->image.c_str(), symbol); });
  if (result != kSuccess) return result;
  std::lock_guard<std::mutex> lock(loaded->mutex);
  LoadedKernel& found = loaded->kernels[symbol];
  found.symbol = symbol;
  found.library = loaded;
  *kernel = reinterpret_cast<Kernel>(&found);
  return kSuccess;
}

Result cuKernelGetFunction(Function* function, Kernel kernel) {
  *function = reinterpret_cast<Function>(kernel);
  return kSuccess;
}

Result cuKernelSetAttribute(int attribute, int value, Kernel kernel, Device device) {
  if (device != 0 || attribute != fa4_jax::cuda::kFunctionMaxDynamicSharedBytes) {
    return Fail(kNotSupported, "only device 0, and only MAX_DYNAMIC_SHARED_SIZE_BYTES");
  }
  reinterpret_cast<LoadedKernel*>(kernel)->most_dynamic_shared_bytes = value;
  return kSuccess;
}

Result cuTensorMapEncodeTiled(TensorMap* map, int type, uint32_t rank, void* address,
                              const uint64_t* sizes, const uint64_t* byte_strides,
                              const uint32_t* box, const uint32_t* element_strides, int interleave,
                              int swizzle, int l2_promotion, int oob_fill) {
  const fa4_jax::TensorMapArguments arguments = {type,         rank, address, sizes,
                                                 byte_strides, box,  swizzle, l2_promotion};
  if (!fa4_jax::Valid(arguments)) {
    return Fail(kInvalidValue, "an address, size, stride or box that the driver refuses");
  }
  const bool dense = std::all_of(element_strides, element_strides + rank,
                                 [](uint32_t stride) { return stride == 1; });
  if (!dense || interleave != 0 || oob_fill != 0) {
    return Fail(kNotSupported, "element strides, interleaved layouts and NaN fill");
  }
  fa4_jax::Encode(arguments, map);
  return kSuccess;
}

Result cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  const auto start = reinterpret_cast<uint64_t>(address);
  if (bytes == 0 || (flags & ~fa4_jax::cuda::kHostMemoryReadOnly) != 0) {
    return Fail(kInvalidValue, "no bytes, or flags other than READ_ONLY");
  }
  for (const Range& range : registered) {
    if (Overlap(range, start, bytes)) {
      return Fail(kAlreadyRegistered, "a part of this memory is registered already");
    }
  }
  registered.push_back({start, bytes, flags != 0, 0});
  return kSuccess;
}

// It has ended when it returns, as launches have.
Result cuMemsetD32Async(DevicePointer address, uint32_t value, size_t count, Stream) {
  const auto found = std::find_if(registered.begin(), registered.end(), [=](const Range& range) {
    return range.address <= address && address + 4 * count <= range.address + range.bytes;
  });
  if (found == registered.end()) return Fail(kNotRegistered, "this thread has not registered it");
  if (address % 4 != 0 || found->read_only != 0) {
    return Fail(kInvalidValue, "an address that is no multiple of 4, or memory for reading only");
  }
  auto* const words = reinterpret_cast<uint32_t*>(address);
  std::fill(words, words + count, value);
  found->set |= 4 * count == found->bytes;
  return kSuccess;
}

Result cuMemHostUnregister(void* address) {
  const auto found = std::find_if(registered.begin(), registered.end(), [=](const Range& range) {
    return range.address == reinterpret_cast<uint64_t>(address);
  });
  if (found == registered.end()) return Fail(kNotRegistered, "this thread has not registered it");
  registered.erase(found);
  return kSuccess;
}

Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** params, void**) {
  const auto& kernel = *reinterpret_cast<const LoadedKernel*>(function);
  if (static_cast<int64_t>(config->dynamic_shared_bytes) > kernel.most_dynamic_shared_bytes) {
    return Fail(kInvalidValue,
                std::to_string(config->dynamic_shared_bytes) +
                    " bytes of dynamic shared memory: the kernel's attribute allows " +
                    std::to_string(kernel.most_dynamic_shared_bytes));
  }
  Launch launch = {};
  launch.image = kernel.library->image.c_str();
  launch.symbol = kernel.symbol.c_str();
  launch.params = params;
  launch.ranges = registered.data();
  launch.num_ranges = static_cast<int32_t>(registered.size());
  std::copy(config->grid, config->grid + 3, launch.grid);
  std::copy(config->block, config->block + 3, launch.block);
  std::fill(launch.cluster, launch.cluster + 3, 1);
  launch.dynamic_shared_bytes = config->dynamic_shared_bytes;
  for (uint32_t i = 0; i < config->num_attributes; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == fa4_jax::cuda::kLaunchClusterDimension) {
      std::copy(attribute.value.cluster, attribute.value.cluster + 3, launch.cluster);
    } else if (attribute.id != fa4_jax::cuda::kLaunchProgrammaticStreamSerialization) {
      // Programmatic launches may overlap, but need not: here they run one after the other.
      return Fail(kNotSupported, "launch attribute " + std::to_string(attribute.id));
    }
  }
  return Ask([&](const Emulator& emulator) { return emulator.launch(&launch); });
}

}  // extern "C"
#pragma GCC visibility pop
