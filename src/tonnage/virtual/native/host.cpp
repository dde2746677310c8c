// Host memory: large tensors that are mapped but not committed, and pinned memory as PyTorch's host allocator keeps it.
#include "bridge.h"

#include <c10/core/CPUAllocator.h>

#include <Python.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tonnage {
namespace {

constexpr size_t kLazyHostBytes = 1 << 20;

std::mutex host_lock;
std::unordered_set<const void*> valueless;
std::unordered_map<void*, size_t> mapped;

PyObject* on_host = nullptr;
pid_t listening_process = 0;
struct Untold { HostEvent kind; const void* data; size_t bytes; };
std::vector<Untold> untold;  // of threads that Python does not know: told with the next event of one that it does

void call_python(const Untold& event, const char* name) {
  PyObject* done = PyObject_CallFunction(on_host, "iKKs", static_cast<int>(event.kind), (unsigned long long)event.data, (unsigned long long)event.bytes, name);
  if (!done) tell_unraisable(on_host);
  Py_XDECREF(done);
}

// False where the memory is not one of our mappings.
bool unmapped(void* data) {
  size_t bytes = 0;
  {
    std::lock_guard<std::mutex> guard(host_lock);
    valueless.erase(data);
    auto found = mapped.find(data);
    if (found == mapped.end()) return false;
    bytes = found->second;
    mapped.erase(found);
  }
  munmap(data, bytes);
  tell_host(kHostFreed, data, bytes);
  return true;
}

void unmap(void* data) { unmapped(data); }

c10::DeleterFnPtr free_plain = nullptr;

// oneDNN takes and returns scratch memory without a DataPtr, so one function must return both kinds of memory.
void unmap_or_free(void* data) {
  if (!unmapped(data)) free_plain(data);
}

}  // namespace

// No lock may be held here: Python's own is waited for.
void tell_host(HostEvent kind, const void* data, size_t bytes) {
  if (!on_host || !is_open() || bytes < kLazyHostBytes || listening_process != getpid() || !Py_IsInitialized()) return;
  std::vector<Untold> events;
  {
    std::lock_guard<std::mutex> guard(host_lock);
    untold.push_back({kind, data, bytes});
    if (!PyGILState_GetThisThreadState()) return;
    events.swap(untold);
  }
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);  // a tensor may die while an exception travels
  for (const auto& event : events) call_python(event, current_operator());
  PyErr_Restore(type, value, trace);
  PyGILState_Release(state);
}

void tick_host() {
  constexpr int64_t kEvery = 50'000'000;
  static std::atomic<int64_t> next{0};
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  const int64_t at = now.tv_sec * 1'000'000'000 + now.tv_nsec;
  if (at < next.load(std::memory_order_relaxed)) return;
  next = at + kEvery;
  tell_host(kHostTick, nullptr, kLazyHostBytes);
}

void tell_host_read(HostEvent kind, const at::TensorBase& from) {
  if (!on_host || !from.has_storage() || from.nbytes() < kLazyHostBytes) return;
  {
    std::lock_guard<std::mutex> guard(host_lock);
    if (mapped.count(const_cast<void*>(from.storage().data()))) return;
  }
  tell_host(kind, from.data_ptr(), from.nbytes());
}

void* map_lazily(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "the host has no address space for ", bytes, " more bytes");
  std::lock_guard<std::mutex> guard(host_lock);
  mapped.emplace(data, bytes);
  return data;
}

namespace {

// Large host tensors are mapped, not committed: pages that nobody writes cost nothing.
struct HostAllocator final : c10::Allocator {
  explicit HostAllocator(c10::Allocator* plain) : plain_(plain) { free_plain = plain->raw_deleter(); }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kLazyHostBytes) return plain_->allocate(bytes);
    void* data = map_lazily(bytes);
    tell_host(kHostAllocated, data, bytes);
    return {data, data, &unmap, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unmap_or_free; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

 private:
  c10::Allocator* plain_;
};

// Pinned memory as PyTorch's caching host allocator hands it out: rounded up to a power of two and kept for reuse.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

// A number with its peak and its totals, as `torch.cuda.host_memory_stats` reports it.
struct Counter {
  uint64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(uint64_t amount) {
    current += amount;
    allocated += amount;
    peak = std::max(peak, current);
  }
  void remove(uint64_t amount) {
    current -= amount;
    freed += amount;
  }
};

struct PinnedPool {
  Counter blocks, requests, block_bytes, request_bytes;
  std::mutex lock;
  std::map<size_t, std::vector<void*>> idle;
  std::unordered_map<void*, size_t> sizes;
  std::map<uintptr_t, size_t> live;
  uint64_t peak = 0;  // of all bytes, which no script resets
};
PinnedPool& pinned_pool() { static auto* pool = new PinnedPool; return *pool; }

void unpin(void* data) {
  auto& pool = pinned_pool();
  std::lock_guard<std::mutex> guard(pool.lock);
  pool.requests.remove(1);
  pool.request_bytes.remove(pool.sizes[data]);
  pool.live.erase(reinterpret_cast<uintptr_t>(data));
  pool.idle[pool.sizes[data]].push_back(data);
}

size_t power_of_two(size_t bytes) {
  size_t rounded = 1;
  while (rounded < bytes) rounded <<= 1;
  return rounded;
}

c10::DataPtr PinnedAllocator::allocate(size_t bytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (bytes == 0) return {nullptr, nullptr, &unpin, cpu};
  auto& pool = pinned_pool();
  const size_t size = power_of_two(bytes);
  std::unique_lock<std::mutex> guard(pool.lock);
  void* data = nullptr;
  bool is_new = false;
  auto& idle = pool.idle[size];
  if (!idle.empty()) {
    data = idle.back();
    idle.pop_back();
  } else {
    data = map_lazily(std::max<size_t>(size, 4096));
    is_new = true;
    pool.sizes[data] = size;
    pool.blocks.add(1);
    pool.block_bytes.add(size);
    pool.peak = std::max(pool.peak, pool.block_bytes.current);
  }
  pool.requests.add(1);
  pool.request_bytes.add(size);
  pool.live[reinterpret_cast<uintptr_t>(data)] = size;
  guard.unlock();
  if (is_new) tell_host(kHostPinned, data, size);
  return {data, data, &unpin, cpu};
}
PinnedAllocator allocator_of_pinned;

}  // namespace

void install_host_allocator() {
  static HostAllocator host(c10::GetDefaultCPUAllocator());
  c10::SetCPUAllocator(&host, 100);
}

c10::Allocator* pinned_allocator() { return &allocator_of_pinned; }

bool is_pinned(const void* data) {
  auto& pool = pinned_pool();
  std::lock_guard<std::mutex> guard(pool.lock);
  auto next = pool.live.upper_bound(reinterpret_cast<uintptr_t>(data));
  if (next == pool.live.begin()) return false;
  --next;
  return reinterpret_cast<uintptr_t>(data) < next->first + next->second;
}

bool is_valueless(const void* data) {
  std::lock_guard<std::mutex> lock(host_lock);
  return valueless.count(data) > 0;
}

void mark_valueless(const void* data) {
  std::lock_guard<std::mutex> lock(host_lock);
  if (mapped.count(const_cast<void*>(data))) valueless.insert(data);
}

extern "C" {

uint64_t tonnage_pinned_peak() {
  auto& pool = pinned_pool();
  std::lock_guard<std::mutex> lock(pool.lock);
  return pool.peak;
}

void tonnage_empty_pinned_cache() {
  auto& pool = pinned_pool();
  std::vector<void*> dropped;
  {
    std::lock_guard<std::mutex> lock(pool.lock);
    for (auto& [size, idle] : pool.idle) {
      for (void* data : idle) {
        pool.sizes.erase(data);
        pool.blocks.remove(1);
        pool.block_bytes.remove(size);
        dropped.push_back(data);
      }
      idle.clear();
    }
  }
  for (void* data : dropped) unmap(data);
}

void tonnage_listen_host(PyObject* callback) {
  on_host = callback == Py_None ? nullptr : callback;
  listening_process = getpid();
}

void tonnage_host_stats(uint64_t* values) {
  auto& pool = pinned_pool();
  std::lock_guard<std::mutex> lock(pool.lock);
  for (const Counter* counter : {&pool.blocks, &pool.requests, &pool.block_bytes, &pool.request_bytes})
    for (uint64_t value : {counter->current, counter->peak, counter->allocated, counter->freed}) *values++ = value;
}

void tonnage_reset_host_stats(bool peaks) {
  auto& pool = pinned_pool();
  std::lock_guard<std::mutex> lock(pool.lock);
  for (Counter* counter : {&pool.blocks, &pool.requests, &pool.block_bytes, &pool.request_bytes}) {
    if (peaks) counter->peak = counter->current;
    else counter->allocated = counter->freed = 0;
  }
}

}  // extern "C"
}  // namespace tonnage
