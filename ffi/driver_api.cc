#include "driver_api.h"

#include <dlfcn.h>

#include <cstdlib>

namespace fa4_jax::cuda {
namespace {

class Loader {
 public:
  Loader(void* library, std::string* error) : library_(library), error_(error) {}

  template <typename F>
  void Find(const char* name, F** function) {
    *function = reinterpret_cast<F*>(dlsym(library_, name));
    if (*function == nullptr) *error_ = std::string("the CUDA driver library has no ") + name;
  }

 private:
  void* library_;
  std::string* error_;
};

DriverOrError Open() {
  DriverOrError result;
  const char* stand_in = std::getenv("FA4_JAX_LIBCUDA");
  const char* path = stand_in != nullptr ? stand_in : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    result.error = std::string("the CUDA driver library cannot be loaded: ") + dlerror();
    return result;
  }
  Loader loader(library, &result.error);
  Driver& driver = result.driver;
  loader.Find("cuGetErrorName", &driver.cuGetErrorName);
  loader.Find("cuGetErrorString", &driver.cuGetErrorString);
  loader.Find("cuDriverGetVersion", &driver.cuDriverGetVersion);
  loader.Find("cuCtxGetDevice", &driver.cuCtxGetDevice);
  loader.Find("cuDeviceGetAttribute", &driver.cuDeviceGetAttribute);
  loader.Find("cuLibraryLoadData", &driver.cuLibraryLoadData);
  loader.Find("cuLibraryGetKernel", &driver.cuLibraryGetKernel);
  loader.Find("cuKernelGetFunction", &driver.cuKernelGetFunction);
  loader.Find("cuKernelSetAttribute", &driver.cuKernelSetAttribute);
  loader.Find("cuTensorMapEncodeTiled", &driver.cuTensorMapEncodeTiled);
  loader.Find("cuMemsetD32Async", &driver.cuMemsetD32Async);
  loader.Find("cuMemHostRegister_v2", &driver.cuMemHostRegister_v2);
  loader.Find("cuMemHostUnregister", &driver.cuMemHostUnregister);
  loader.Find("cuLaunchKernelEx", &driver.cuLaunchKernelEx);
  if (!result.error.empty()) result.error += std::string(" (") + path + ")";
  return result;
}

}  // namespace

const DriverOrError& GetDriver() {
  static const DriverOrError* const driver = new DriverOrError(Open());
  return *driver;
}

std::string Describe(const Driver& driver, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(result, &name) != kSuccess || name == nullptr) {
    return "CUDA error " + std::to_string(result);
  }
  driver.cuGetErrorString(result, &text);
  return std::string(name) + " (" + (text != nullptr ? text : "no description") + ")";
}

}  // namespace fa4_jax::cuda
