#include "registry.h"

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace fa4_jax {
namespace {

using Table = std::map<std::string, Kernel*, std::less<>>;

// Readers take no lock, so a published table never changes and is not freed when replaced: there
// are as many tables as there were calls of AddKernels, which is one in a usual process.
std::atomic<const Table*> current{nullptr};
std::mutex writers;

}  // namespace

void AddKernels(std::vector<KernelSpec> specs) {
  std::lock_guard<std::mutex> lock(writers);
  const Table* old = current.load(std::memory_order_relaxed);
  Table* table = old == nullptr ? new Table : new Table(*old);
  for (KernelSpec& spec : specs) {
    std::string name = spec.name;
    (*table)[std::move(name)] = new Kernel(std::move(spec));
  }
  current.store(table, std::memory_order_release);
}

Kernel* FindKernel(std::string_view name) {
  const Table* table = current.load(std::memory_order_acquire);
  if (table == nullptr) return nullptr;
  auto found = table->find(name);
  return found == table->end() ? nullptr : found->second;
}

}  // namespace fa4_jax
