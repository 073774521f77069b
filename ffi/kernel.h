// A registered kernel: its launch description, and the cubin loaded at first use.
#ifndef FA4_JAX_FFI_KERNEL_H_
#define FA4_JAX_FFI_KERNEL_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "driver_api.h"
#include "kernel_record.h"
#include "xla/ffi/api/ffi.h"

namespace fa4_jax {

inline constexpr int kMaxParams = 64;
inline constexpr int kMaxTensorMaps = 16;
inline constexpr int kMaxBuffers = 32;
inline constexpr int kMaxDevices = 64;

// These own what the records borrow.
struct ParamSpec {
  std::string name;
  ParamKind kind;
  int32_t buffer;
  int32_t rank;
  int32_t swizzle_bytes;
  std::array<int32_t, 5> axes;
  std::array<int32_t, 5> box;
  Range size;
};

struct BufferSpec {
  std::string name;
  std::optional<xla::ffi::DataType> dtype;
  int32_t alias;
  Range shape;
  bool zeroed;  // the handler writes zeros to it before the launch; its elements have 32 bits
  int32_t min_rank;
};

// The factors of sizes, which the kernels that were registered together share.
struct SizeTables {
  std::vector<Range> sizes;
  std::vector<FactorRecord> factors;
};

struct KernelSpec {
  std::string name;
  std::string arch;
  xla::ffi::DataType dtype = xla::ffi::DataType::INVALID;
  std::string file;
  std::string sha256;
  std::string symbol;
  std::vector<BufferSpec> buffers;  // operands, then results
  std::vector<ParamSpec> params;
  std::shared_ptr<const SizeTables> tables;
  int32_t num_operands = 0;
  uint32_t block[3] = {};
  uint32_t cluster[3] = {};
  uint32_t dynamic_shared_bytes = 0;
  // CTAs that a multiprocessor has at a time, or 0 for a grid of all tiles.
  uint32_t persistent = 0;
  bool programmatic = false;  // it may start while the launch before it ends
  Range grid[3] = {};
};

// Copies the records; returns an error if one contradicts itself.
xla::ffi::ErrorOr<std::vector<KernelSpec>> ReadRecords(const Records& records);

// It is thread-safe and never destroyed: executables may launch until the process ends.
class Kernel {
 public:
  explicit Kernel(KernelSpec spec) : spec_(std::move(spec)) {}
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const KernelSpec& spec() const { return spec_; }

  // Makes the kernel launchable on `device`: reads, verifies and loads the cubin if no device had
  // it yet, and sets the device's attributes. One atomic load if that was done before.
  xla::ffi::Error EnsureReady(const cuda::Driver& driver, cuda::Device device);

  // Valid after EnsureReady.
  cuda::Kernel handle() const { return handle_; }
  int multiprocessors(cuda::Device device) const { return multiprocessors_[device]; }

 private:
  xla::ffi::Error Load(const cuda::Driver& driver);
  xla::ffi::Error PrepareDevice(const cuda::Driver& driver, cuda::Device device);
  xla::ffi::Error CheckArchitecture(const cuda::Driver& driver, cuda::Device device) const;

  const KernelSpec spec_;
  std::mutex mutex_;
  cuda::Kernel handle_ = nullptr;
  std::array<int, kMaxDevices> multiprocessors_ = {};
  std::atomic<uint64_t> ready_{0};  // a bit per device
};

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_KERNEL_H_
