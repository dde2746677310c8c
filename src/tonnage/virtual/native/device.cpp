// A CUDA device that is only its host side: guard, streams, events, generators, hooks and allocators.
// No kernel is known here; see kernels.cpp.
#include <Python.h>

#include "bridge.h"

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/TensorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Context.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <cstring>
#include <unordered_set>
#include <vector>

namespace tonnage {
namespace {

constexpr int kMaxDevices = 64;

std::atomic<int> device_count{1};
std::atomic<bool> closed{true};
std::atomic<uint32_t> session{0};
std::atomic<long> cudnn_version{91900};
PyObject* on_malloc = nullptr;
PyObject* on_free = nullptr;
PyObject* on_record_stream = nullptr;
PyObject* on_synchronize = nullptr;

thread_local int current_device = 0;
thread_local int64_t current_streams[kMaxDevices] = {};

// Streams come from pools of 32, one for each priority, in turn; an id is written as PyTorch writes it.
constexpr uint32_t kStreamsPerPool = 32;
constexpr int kPriorities = 4;
std::atomic<uint32_t> handed_out[kMaxDevices][kPriorities] = {};

int64_t new_stream(int device, int priority) {
  const int level = std::clamp(-priority, 0, kPriorities - 1);
  const int64_t index = handed_out[device][level]++ % kStreamsPerPool;
  return index << 5 | (level + 1) << 1 | 1;
}

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// ---- what is being computed: operator names and forward contexts, for attribution -----------------------------

struct Frame {
  const char* name;
  int32_t context;   // >= 0 only for a backward node: the context of the forward call that made it
  bool is_backward;
  uint64_t serial;   // of this call, so that a block that dies in the call that made it can be told as its temporary
};
thread_local std::vector<Frame> frames;
std::atomic<uint64_t> next_serial{0};

constexpr size_t kSequenceSlots = 1 << 22;
int32_t* context_of_sequence = nullptr;

bool only_allocates(const char* name) {
  static const std::unordered_set<std::string> names = {
      "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::resize_"};
  return names.count(name) > 0;
}

// The one node of autograd that stands for all of a graph that torch.compile made.
bool is_compiled(const char* name) { return std::strncmp(name, "CompiledFunction", 16) == 0; }

std::unique_ptr<at::ObserverContext> operator_starts(const at::RecordFunction& fn);
void operator_ends(const at::RecordFunction&, at::ObserverContext*) {
  if (!frames.empty()) frames.pop_back();
}

}  // namespace

extern "C" {
int32_t tonnage_context = 0;
}

namespace {

std::unique_ptr<at::ObserverContext> operator_starts(const at::RecordFunction& fn) {
  tick_host();
  const bool backward = fn.scope() == at::RecordScope::BACKWARD_FUNCTION;
  const int64_t sequence = fn.seqNr();
  int32_t context = -1;
  if (sequence >= 0) {
    auto& slot = context_of_sequence[static_cast<size_t>(sequence) & (kSequenceSlots - 1)];
    if (backward) context = slot;
    else if (!frames.empty() && frames.front().is_backward) slot = frames.front().context;  // double backward
    else slot = tonnage_context;
  }
  const char* name = fn.name();
  const bool inherits = !frames.empty() && *frames.back().name && only_allocates(name);
  if (!backward && inherits) frames.push_back({frames.back().name, context, false, frames.back().serial});
  else if (std::strstr(name, "::") || (backward && !is_compiled(name))) frames.push_back({name, context, backward, ++next_serial});
  else frames.push_back({"", context, backward, 0});  // a region of many operators: what dies in it is not a temporary
  return nullptr;
}

uint64_t current_serial() { return frames.empty() ? 0 : frames.back().serial; }

int32_t backward_context() {
  for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame)
    if (frame->is_backward) return frame->context;
  return -1;
}

thread_local struct { c10::IntArrayRef sizes; const char* dtype = ""; } described;

// ---- the device's memory ----------------------------------------------------------------------------------------

void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (closed || block->session != session || !Py_IsInitialized()) return;
  Gil gil;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);   // a tensor may die while an exception travels
  PyObject* done = PyObject_CallFunction(on_free, "KK", (unsigned long long)block->address, (unsigned long long)current_serial());
  if (!done) tell_unraisable(on_free);
  Py_XDECREF(done);
  PyErr_Restore(type, value, trace);
}

PyObject* shape_object() {
  const auto& sizes = described.sizes;
  PyObject* shape = PyTuple_New(static_cast<Py_ssize_t>(sizes.size()));
  for (size_t i = 0; i < sizes.size(); ++i) PyTuple_SET_ITEM(shape, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(sizes[i]));
  return shape;
}

uint64_t request(size_t bytes, int device) {
  Gil gil;
  const char* name = frames.empty() ? "" : frames.back().name;
  PyObject* got = PyObject_CallFunction(
      on_malloc, "KiLsiKNs", (unsigned long long)bytes, device, (long long)current_streams[device], name, backward_context(),
      (unsigned long long)current_serial(), shape_object(), described.dtype);
  if (!got) rethrow_python_error();
  uint64_t address = PyLong_AsUnsignedLongLong(got);
  Py_DECREF(got);
  return address;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device;
    const c10::Device where(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    TORCH_CHECK(on_malloc, "the virtual GPU is not started");
    auto* block = new Block{0, bytes, device, c10::Storage(), session};
    try {
      block->address = request(bytes, device);
    } catch (...) {
      delete block;
      throw;
    }
    return {reinterpret_cast<void*>(block->address), block, &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {}
};
DeviceAllocator allocator_of_device;

// ---- random numbers -----------------------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(c10::DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom(true)); return seed_; }
  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::TensorBase state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = reinterpret_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    auto* words = static_cast<const uint64_t*>(state.data());
    if (state.numel() >= 8) seed_ = words[0];
    offset_ = state.numel() >= 16 ? words[1] : 0;
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

// ---- guard and hooks ------------------------------------------------------------------------------------------------

c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }

c10::DeviceIndex checked_index_of(c10::Device device) {
  const auto index = index_of(device);
  if (index < device_count) return index;
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 101,
      "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n");
}

using Moment = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return static_type; }
  static c10::Device device(int index) { return {static_type, static_cast<c10::DeviceIndex>(index)}; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto old = device(current_device);
    current_device = checked_index_of(to);
    return old;
  }
  c10::Device getDevice() const override { return device(current_device); }
  void setDevice(c10::Device to) const override { current_device = checked_index_of(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = index_of(to); }
  static c10::Stream stream(c10::Device of, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device(index_of(of)), id);
  }
  c10::Stream getStream(c10::Device of) const override { return stream(of, current_streams[index_of(of)]); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(of, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool high) const override {
    return stream(of, new_stream(index_of(of), high ? -kPriorities : 0));
  }
  c10::Stream getNewStream(c10::Device of, int priority) const override {
    return stream(of, new_stream(index_of(of), priority));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto& slot = current_streams[index_of(to.device())];
    const auto old = stream(to.device(), slot);
    slot = to.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count.load()); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Moment;
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize(); }
  // Nothing runs on the device, so this is the host's time between the two records.
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Moment*>(end) - *static_cast<Moment*>(start)).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (!data.get()) return;
    Gil gil;
    PyObject* done = PyObject_CallFunction(
        on_record_stream, "KL", (unsigned long long)reinterpret_cast<uintptr_t>(data.get()), (long long)stream.id());
    if (!done) rethrow_python_error();
    Py_DECREF(done);
  }
};
Guard guard;

}  // namespace

c10::Allocator* device_allocator() { return &allocator_of_device; }

Describe::Describe(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  described.sizes = sizes;
  described.dtype = c10::toString(dtype);
}

Describe::~Describe() {
  described.sizes = {};
  described.dtype = "";
}

// Nothing is behind no bytes, though they come from our allocator as well.
static Block* block_behind(const c10::DataPtr& data) {
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

Block* block_of(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.has_storage() ? block_behind(tensor.storage().data_ptr()) : nullptr;
}

bool is_open() { return !closed; }
const char* current_operator() { return frames.empty() ? "" : frames.back().name; }

uint32_t current_session() { return session; }

int64_t current_stream_id(int device) { return current_streams[device]; }

void synchronize() {
  if (!on_synchronize) return;
  Gil gil;
  PyObject* done = PyObject_CallNoArgs(on_synchronize);
  if (!done) tell_unraisable(on_synchronize);
  Py_XDECREF(done);
}

void tell_unraisable(PyObject* where) {
  if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) return PyErr_WriteUnraisable(where);
  PyErr_Clear();
  PyErr_SetInterrupt();  // it cannot be raised from here: once more, where it can
}

void rethrow_python_error() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* text = value ? PyObject_Str(value) : nullptr;
  const char* utf8 = text ? PyUnicode_AsUTF8(text) : nullptr;
  std::string message = utf8 ? utf8 : "the virtual GPU failed";
  bool memory = value && PyObject_HasAttrString(value, "is_out_of_memory");
  if (type && PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt)) message = INTERRUPTED;
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  PyErr_Clear();
  if (memory) throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
  TORCH_CHECK(false, message);
}

}  // namespace tonnage

namespace at {

struct TonnageHooks : CUDAHooksInterface {
  explicit TonnageHooks(CUDAHooksArgs) {}
  void init() const override {}
  const Generator& getDefaultGenerator(DeviceIndex index = -1) const override {
    static auto* generators = new std::map<int, Generator>;
    if (index < 0) index = tonnage::guard.getDevice().index();
    auto found = generators->find(index);
    if (found == generators->end()) found = generators->emplace(index, make_generator<tonnage::Generator>(index)).first;
    return found->second;
  }
  Generator getNewGenerator(DeviceIndex index = -1) const override {
    return make_generator<tonnage::Generator>(index < 0 ? tonnage::guard.getDevice().index() : index);
  }
  Device getDeviceFromPtr(void*) const override { return tonnage::guard.getDevice(); }
  bool isPinnedPtr(const void* data) const override { return tonnage::is_pinned(data); }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasMAGMA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool hasCuSOLVER() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return tonnage::guard.getDevice().index(); }
  Allocator* getPinnedMemoryAllocator() const override { return tonnage::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return tonnage::device_allocator(); }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return tonnage::cudnn_version; }
  long versionRuntimeCuDNN() const override { return tonnage::cudnn_version; }
  long versionCUDART() const override { return 13000; }
  std::string showConfig() const override { return "virtual GPU"; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  int64_t cuFFTGetPlanCacheMaxSize(DeviceIndex) const override { return 4096; }
  void cuFFTSetPlanCacheMaxSize(DeviceIndex, int64_t) const override {}
  int64_t cuFFTGetPlanCacheSize(DeviceIndex) const override { return 0; }
  void cuFFTClearPlanCache(DeviceIndex) const override {}
  int getNumGPUs() const override { return tonnage::device_count; }
  void deviceSynchronize(DeviceIndex) const override { tonnage::synchronize(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(tonnage::device_count.load()); }
  void setCurrentDevice(DeviceIndex index) const override { tonnage::current_device = index; }
  DeviceIndex getCurrentDevice() const override { return tonnage::guard.getDevice().index(); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return tonnage::guard.exchangeDevice({DeviceType::CUDA, index}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? DeviceIndex(-1) : exchangeDevice(index);
  }
};

// The registry knows CUDA's hooks by this one name.
using CUDAHooks = TonnageHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace tonnage {
namespace {

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// PyTorch asks for CUDA's hooks once and keeps the answer. Where it asked before this library was loaded it keeps the
// empty interface; neither class has data, so that object can become ours.
void take_over_hooks() {
  const at::CUDAHooksInterface& kept = at::detail::getCUDAHooks();
  static_assert(sizeof(at::TonnageHooks) == sizeof(at::CUDAHooksInterface));
  if (!kept.hasCUDA()) new (const_cast<at::CUDAHooksInterface*>(&kept)) at::TonnageHooks(at::CUDAHooksArgs{});
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
    guard.recordDataPtrOnStream(self.storage().data_ptr(), stream);
  });
}

namespace {

// As CUDA does it: the new block is there before the old one goes, and nothing at all is held for no bytes.
void resize_storage(c10::Storage storage, int64_t bytes) {
  TORCH_CHECK(bytes >= 0, "a storage cannot have ", bytes, " bytes");
  c10::DeviceGuard on(storage.device());
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  Describe as(bytes, at::kByte);
  c10::DataPtr data = allocator_of_device.allocate(static_cast<size_t>(bytes));
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

}  // namespace

// Python has no other way to a default generator, or to a storage of another size, in a build without CUDA.
TORCH_LIBRARY_FRAGMENT(tonnage, library) {
  library.def("default_generator(int index) -> Generator?", [](int64_t index) {
    return at::globalContext().defaultGenerator({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)});
  });
  library.def("resize_storage(Storage storage, int bytes) -> ()", &resize_storage);
}

extern "C" {

void tonnage_start(PyObject* malloc, PyObject* free, PyObject* record_stream, PyObject* synchronize_, int devices) {
  for (PyObject* callback : {malloc, free, record_stream, synchronize_}) Py_INCREF(callback);
  on_malloc = malloc;
  on_free = free;
  on_record_stream = record_stream;
  on_synchronize = synchronize_;
  device_count = devices;
  ++session;
  closed = false;
  static bool once = [] {
    take_over_hooks();
    context_of_sequence = static_cast<int32_t*>(map_lazily(kSequenceSlots * sizeof(int32_t)));
    c10::SetAllocator(c10::DeviceType::CUDA, &allocator_of_device, 100);
    install_host_allocator();
    at::addGlobalCallback(at::RecordFunctionCallback(&operator_starts, &operator_ends)
                              .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
    return true;
  }();
  (void)once;
}

void tonnage_close() { closed = true; }

void tonnage_set_cudnn_version(int64_t version) { cudnn_version = static_cast<long>(version); }

int64_t tonnage_current_stream(int device) { return current_streams[device]; }
void tonnage_set_stream(int device, int64_t stream) { current_streams[device] = stream; }
int tonnage_current_device() { return current_device; }
void tonnage_set_device(int device) { current_device = device; }
int64_t tonnage_new_stream(int device, int priority) { return new_stream(device, priority); }

// Whether the values behind a storage (a c10::StorageImpl, Python's `untyped_storage()._cdata`) are known.
bool tonnage_is_known(const c10::StorageImpl* storage) {
  const Block* block = block_behind(storage->data_ptr());
  return block ? block->shadow.unsafeGetStorageImpl() != nullptr : storage->nbytes() == 0;
}

// From now on nobody knows the values behind a storage.
void tonnage_forget(const c10::StorageImpl* storage) {
  if (Block* block = block_behind(storage->data_ptr())) {
    block->shadow = c10::Storage();
    block->law = 0;
    block->guess = false;
  }
}

// Says that the known values behind a storage were assumed.
void tonnage_mark_guessed(const c10::StorageImpl* storage) {
  if (Block* block = block_behind(storage->data_ptr())) mark_guess(*block);
}

// The number of the law that the values behind a storage follow; 0 is none.
int32_t tonnage_law(const c10::StorageImpl* storage) {
  const Block* block = block_behind(storage->data_ptr());
  return block ? block->law : 0;
}

}  // extern "C"
}  // namespace tonnage
