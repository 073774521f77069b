#include "kernel.h"

#include <cstdio>
#include <memory>

#include "errors.h"
#include "sha256.h"

namespace fa4_jax {

namespace ffi = xla::ffi;

namespace {

// An "sm_90a" cubin runs on 9.0 alone; an "sm_100f" cubin on its family, 10.x.
bool Runs(const std::string& arch, int major, int minor) {
  bool family = arch.back() == 'f';
  std::string number = arch.substr(3, arch.size() - 4);
  int built = std::stoi(number);
  return family ? major == built / 10 && minor >= built % 10 : 10 * major + minor == built;
}

// Returns the file's bytes, or nothing if it cannot be read.
std::optional<std::string> ReadFile(const std::string& path) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (file == nullptr) return std::nullopt;
  std::string bytes;
  char chunk[16384];
  size_t count = 0;
  while ((count = std::fread(chunk, 1, sizeof(chunk), file.get())) > 0) bytes.append(chunk, count);
  if (std::ferror(file.get())) return std::nullopt;
  return bytes;
}

}  // namespace

ffi::Error Kernel::EnsureReady(const cuda::Driver& driver, cuda::Device device) {
  if (device < 0 || device >= kMaxDevices) {
    return FailedPrecondition("kernel " + spec_.name, "device ordinal " + std::to_string(device) +
                                                          " is not below " +
                                                          std::to_string(kMaxDevices));
  }
  const uint64_t bit = uint64_t{1} << device;
  if (ready_.load(std::memory_order_acquire) & bit) return ffi::Error::Success();
  std::lock_guard<std::mutex> lock(mutex_);
  if (ready_.load(std::memory_order_relaxed) & bit) return ffi::Error::Success();
  FA4_JAX_RETURN_IF_ERROR(CheckArchitecture(driver, device));
  if (handle_ == nullptr) FA4_JAX_RETURN_IF_ERROR(Load(driver));
  FA4_JAX_RETURN_IF_ERROR(PrepareDevice(driver, device));
  ready_.fetch_or(bit, std::memory_order_release);
  return ffi::Error::Success();
}

ffi::Error Kernel::CheckArchitecture(const cuda::Driver& driver, cuda::Device device) const {
  int major = 0;
  int minor = 0;
  FA4_JAX_RETURN_IF_ERROR(CheckDriver(
      driver, driver.cuDeviceGetAttribute(&major, cuda::kDeviceComputeCapabilityMajor, device),
      "kernel " + spec_.name, "cuDeviceGetAttribute"));
  FA4_JAX_RETURN_IF_ERROR(CheckDriver(
      driver, driver.cuDeviceGetAttribute(&minor, cuda::kDeviceComputeCapabilityMinor, device),
      "kernel " + spec_.name, "cuDeviceGetAttribute"));
  if (Runs(spec_.arch, major, minor)) return ffi::Error::Success();
  return FailedPrecondition("kernel " + spec_.name,
                            "compiled for " + spec_.arch + ", cannot run on device " +
                                std::to_string(device) + " of compute capability " +
                                std::to_string(major) + "." + std::to_string(minor));
}

ffi::Error Kernel::Load(const cuda::Driver& driver) {
  const std::string subject = "kernel " + spec_.name + ", cubin " + spec_.file;
  const std::optional<std::string> image = ReadFile(spec_.file);
  if (!image) return FailedPrecondition(subject, "the file cannot be read");
  const std::string digest = Sha256(image->data(), image->size());
  if (digest != spec_.sha256) {
    return FailedPrecondition(subject, "the file is damaged or of another build: SHA-256 is " +
                                           digest + ", the manifest says " + spec_.sha256);
  }
  // Without CU_LIBRARY_BINARY_IS_PRESERVED the driver keeps a copy of the image.
  cuda::Library library = nullptr;
  const cuda::Result loaded =
      driver.cuLibraryLoadData(&library, image->data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  int cuda_version = 0;
  if (loaded != cuda::kSuccess) driver.cuDriverGetVersion(&cuda_version);
  FA4_JAX_RETURN_IF_ERROR(
      CheckDriver(driver, loaded, subject,
                  ("cuLibraryLoadData of a driver for CUDA " + std::to_string(cuda_version / 1000) +
                   "." + std::to_string(cuda_version % 1000 / 10))
                      .c_str()));
  return CheckDriver(driver, driver.cuLibraryGetKernel(&handle_, library, spec_.symbol.c_str()),
                     subject, "cuLibraryGetKernel");
}

ffi::Error Kernel::PrepareDevice(const cuda::Driver& driver, cuda::Device device) {
  const std::string subject = "kernel " + spec_.name + ", device " + std::to_string(device);
  FA4_JAX_RETURN_IF_ERROR(
      CheckDriver(driver,
                  driver.cuDeviceGetAttribute(&multiprocessors_[device],
                                              cuda::kDeviceMultiprocessorCount, device),
                  subject, "cuDeviceGetAttribute"));
  FA4_JAX_RETURN_IF_ERROR(CheckDriver(
      driver,
      driver.cuKernelSetAttribute(cuda::kFunctionMaxDynamicSharedBytes,
                                  static_cast<int>(spec_.dynamic_shared_bytes), handle_, device),
      subject,
      ("cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES = " +
       std::to_string(spec_.dynamic_shared_bytes) + ")")
          .c_str()));
  // Loading is lazy per context, and must not happen first under stream capture.
  cuda::Function function = nullptr;
  return CheckDriver(driver, driver.cuKernelGetFunction(&function, handle_), subject,
                     "cuKernelGetFunction");
}

}  // namespace fa4_jax
