// Kernels on the CUDA dispatch key that compute shapes instead of values.
//
// Almost every operator goes through `compute`: it runs the operator's own Meta kernel to learn what comes out and then
// allocates that on the virtual device. Where all inputs have known values (see Block::shadow) it runs the CPU kernel on
// them instead, so that the outputs are known too. What a CUDA kernel allocates besides its outputs is not known here:
// those operators are written in Python (../kernels) and come back to `compute` through the key kPlain.
#include <Python.h>

#include "bridge.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/RNN.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace tonnage {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kPlain = c10::DispatchKey::PrivateUse3;
constexpr int64_t kKnownIntegers = 1 << 20;   // elements whose values are kept, of integers and booleans
constexpr int64_t kKnownFloats = 1 << 12;     // and of floating point

PyObject* on_unknown = nullptr;       // a value was read that nobody knows
PyObject* on_unmodelled = nullptr;    // an operator has no shape rule
PyObject* on_library = nullptr;       // a library's handle is used: its workspace may be due

// ---- geometry -------------------------------------------------------------------------------------------------------

bool is_device(const Tensor& t) { return t.defined() && t.device().type() == c10::DeviceType::CUDA; }

Tensor device_empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  Describe as(sizes, dtype);
  return Tensor(at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
}

Tensor with_geometry_of(const Tensor& t, c10::Storage storage, c10::DispatchKeySet keys) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, t.dtype());
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return Tensor(std::move(impl));
}

Tensor as_meta(const Tensor& t) {
  const c10::Device meta(c10::DeviceType::Meta);
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::DataPtr(nullptr, meta),
                       c10::GetAllocator(c10::DeviceType::Meta), true);
  return with_geometry_of(t, std::move(storage), c10::DispatchKeySet(c10::DispatchKey::Meta));
}

Tensor shadow_of(const Tensor& t) {
  return with_geometry_of(t, block_of(t)->shadow, c10::DispatchKeySet(c10::DispatchKey::CPU));
}

Tensor view_like(const Tensor& base, const Tensor& geometry) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), geometry.dtype());
  impl->set_sizes_and_strides(geometry.sizes(), geometry.strides(), geometry.storage_offset());
  return Tensor(std::move(impl));
}

// ---- what is known of values -------------------------------------------------------------------------------------------

bool small_enough(int64_t numel, at::ScalarType dtype) {
  return numel <= (at::isIntegralType(dtype, true) ? kKnownIntegers : kKnownFloats);
}

bool is_known(const Tensor& t) {
  if (t.numel() == 0) return true;
  const Block* block = block_of(t);
  return block && block->shadow.unsafeGetStorageImpl() != nullptr;
}

bool covers_storage(const Tensor& t) {
  return t.is_non_overlapping_and_dense() && t.numel() * t.element_size() == static_cast<int64_t>(t.storage().nbytes());
}

void forget(const Tensor& t) {
  if (Block* block = block_of(t)) block->shadow = c10::Storage();
}

// A blank shadow to be written as a whole; false where none is kept for such a tensor.
bool prepare_shadow(const Tensor& t) {
  Block* block = block_of(t);
  if (!block) return t.numel() == 0;
  if (is_known(t)) return true;
  if (!covers_storage(t) || !small_enough(t.numel(), t.scalar_type())) return false;
  block->shadow = c10::Storage(
      c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::GetDefaultCPUAllocator()->allocate(t.storage().nbytes()),
      c10::GetDefaultCPUAllocator(), true);
  return true;
}

void adopt_shadow(const Tensor& t, const Tensor& values) {
  Block* block = block_of(t);
  if (block && small_enough(t.numel(), t.scalar_type()) && t.strides() == values.strides() && values.storage_offset() == 0)
    block->shadow = values.storage();
}

// ---- what an operator is -------------------------------------------------------------------------------------------------

struct Traits {
  std::vector<bool> written;      // per argument: annotated as mutated
  std::vector<bool> out;          // per argument: mutated and given by keyword, so its old value is never read
  bool random = false;
  bool overwrites = false;        // in place, but never reads what it overwrites
  const char* library = nullptr;  // "cublas", ...: whose workspace it needs
  bool values = true;             // whether to try known values
  bool in_place = false;          // only writes into its arguments: there is nothing to allocate
  bool each_alike = false;        // a list in, a list of the same shapes out
  const c10::SafeKernelFunction* shape_rule = nullptr;   // PyTorch's own in C++, where there is one
};

std::mutex traits_lock;
std::unordered_map<std::string, std::string> libraries;
std::unordered_set<std::string> valueless_operators;

// Importing torch replaces many shape rules by slower ones in Python; those that were there before are kept here.
std::unordered_map<std::string, c10::SafeKernelFunction>& native_shape_rules() {
  static auto* rules = new std::unordered_map<std::string, c10::SafeKernelFunction>;
  return *rules;
}

bool only_writes(const c10::OperatorHandle& op, const Traits& traits) {
  const auto& name = op.schema().name();
  if (name.back() != '_' || op.hasTag(at::Tag::inplace_view)) return false;
  if (op.schema().returns().empty()) return name.rfind("aten::_foreach_", 0) == 0;
  return op.schema().returns().size() == 1 && traits.written[0] && !traits.out[0];
}

bool maps_each_alike(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::_foreach_sqrt", "aten::_foreach_neg", "aten::_foreach_exp", "aten::_foreach_abs", "aten::_foreach_reciprocal",
      "aten::_foreach_add", "aten::_foreach_sub", "aten::_foreach_mul", "aten::_foreach_div", "aten::_foreach_addcmul",
      "aten::_foreach_addcdiv", "aten::_foreach_lerp", "aten::_foreach_maximum", "aten::_foreach_clamp_min"};
  return names.count(name) > 0;
}

Traits inspect(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> overwriting = {
      "aten::fill_", "aten::zero_", "aten::random_", "aten::uniform_", "aten::normal_", "aten::bernoulli_"};
  Traits traits;
  const auto& schema = op.schema();
  for (const auto& argument : schema.arguments()) {
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    traits.written.push_back(written);
    traits.out.push_back(written && argument.is_out());
    if (argument.name() == "generator") traits.random = true;
  }
  traits.overwrites = overwriting.count(schema.name()) > 0;
  if (schema.name() == "aten::random_" || schema.name() == "aten::randperm") traits.random = false;
  auto library = libraries.find(schema.name());
  if (library != libraries.end()) traits.library = library->second.c_str();
  traits.values = !valueless_operators.count(schema.name());
  auto rule = native_shape_rules().find(c10::toString(op.operator_name()));
  if (rule != native_shape_rules().end()) traits.shape_rule = &rule->second;
  traits.in_place = only_writes(op, traits);
  traits.each_alike = maps_each_alike(schema.name());
  return traits;
}

const Traits& traits_of(const c10::OperatorHandle& op) {
  static std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Traits>> known;
  std::lock_guard<std::mutex> guard(traits_lock);
  auto& slot = known[&op.schema()];
  if (!slot) slot = std::make_unique<Traits>(inspect(op));
  return *slot;
}

// ---- stacks ----------------------------------------------------------------------------------------------------------------

template <class F>
IValue map_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorList()) {
      std::optional<Tensor> each = t;
      list.push_back(each ? std::optional<Tensor>(f(*each)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <class F>
void for_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) f(value.toTensor());
  else if (value.isTensorList() || value.isOptionalTensorList())
    map_tensors(value, [&](const Tensor& t) { f(t); return t; });
}

// The stand-ins handed to the Meta or CPU kernel, each beside the tensor it stands for.
struct Stand {
  Tensor original, stand;
  bool written;
};

IValue elsewhere(const IValue& value, c10::DeviceType where) {
  if (value.isDevice()) return c10::Device(where);
  if (value.isGenerator()) return IValue();
  return value;
}

template <class F>
std::vector<Stand> replace(const Traits& traits, Stack& arguments, c10::DeviceType where, F&& stand_for) {
  std::vector<Stand> stands;
  for (size_t i = 0; i < arguments.size(); ++i) {
    arguments[i] = elsewhere(arguments[i], where);
    arguments[i] = map_tensors(arguments[i], [&](const Tensor& t) {
      if (!t.defined()) return t;
      for (auto& known : stands)
        if (known.original.is_same(t)) { known.written |= traits.written[i]; return known.stand; }
      Tensor stand = stand_for(t, i);
      if (!stand.is_same(t)) stands.push_back({t, stand, traits.written[i]});
      return stand;
    });
  }
  return stands;
}

// ---- the two ways to learn what comes out ------------------------------------------------------------------------------------

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView guard;
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::DispatchKeySet(c10::DispatchKey::Python)};
  c10::impl::ExcludeDispatchKeyGuard no_snapshot{c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot)};
};

void follow_resize(const Tensor& original, const Tensor& stand) {
  if (original.sizes() == stand.sizes() && original.strides() == stand.strides()) return;
  auto* impl = original.unsafeGetTensorImpl();
  const size_t needed = at::detail::computeStorageNbytes(
      stand.sizes(), stand.strides(), original.element_size(), original.storage_offset());
  auto* storage = original.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    storage->set_data_ptr_noswap(device_allocator()->allocate(needed));
    storage->set_nbytes(needed);
  }
  impl->set_sizes_and_strides(stand.sizes(), stand.strides(), original.storage_offset());
}

Tensor bring_back(const Tensor& result, const std::vector<Stand>& stands, bool known) {
  if (!result.defined()) return result;
  for (const auto& stand : stands)
    if (stand.stand.is_same(result)) return stand.original;
  for (const auto& stand : stands)
    if (stand.stand.has_storage() && result.has_storage() && stand.stand.storage().is_alias_of(result.storage()))
      return view_like(stand.original, result);
  if (result.device().type() == c10::DeviceType::CUDA) return result;
  Tensor fresh = device_empty_strided(result.sizes(), result.strides(), result.scalar_type());
  if (known) adopt_shadow(fresh, result);
  return fresh;
}

int64_t broadcast_numel(const Stack& arguments) {
  std::vector<int64_t> largest;
  for (const auto& value : arguments)
    for_tensors(value, [&](const Tensor& t) {
      if (!t.defined()) return;
      for (int64_t i = 0; i < t.dim(); ++i) {
        if (static_cast<size_t>(i) >= largest.size()) largest.push_back(1);
        largest[i] = std::max(largest[i], t.size(t.dim() - 1 - i));
      }
    });
  int64_t numel = 1;
  for (int64_t size : largest) numel *= size;
  return numel;
}

bool values_are_known(const Traits& traits, const Stack& arguments) {
  if (traits.random || !traits.values) return false;
  bool known = true, any = false;
  for (size_t i = 0; i < arguments.size() && known; ++i)
    for_tensors(arguments[i], [&](const Tensor& t) {
      if (!is_device(t)) { known &= !t.defined() || t.numel() <= kKnownIntegers; return; }
      any = true;
      const bool blank = traits.out[i] || (traits.overwrites && traits.written[i]);
      if (blank && t.numel() == 0) return;
      known &= blank ? (is_known(t) || (covers_storage(t) && small_enough(t.numel(), t.scalar_type()))) : is_known(t);
    });
  return any && known && broadcast_numel(arguments) <= 4 * kKnownIntegers;
}

struct Outcome {
  std::vector<Stand> stands;
  bool known;
};

Outcome run_on_values(const c10::OperatorHandle& op, const Traits& traits, Stack& arguments) {
  auto stands = replace(traits, arguments, c10::DeviceType::CPU, [&](const Tensor& t, size_t) {
    if (!is_device(t)) return t;
    if (t.numel() == 0 || !block_of(t))
      return Tensor(at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type()));
    prepare_shadow(t);
    return shadow_of(t);
  });
  BelowAutograd below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  return {std::move(stands), true};
}

Outcome run_on_shapes(const c10::OperatorHandle& op, const Traits& traits, Stack& arguments) {
  auto stands = replace(traits, arguments, c10::DeviceType::Meta, [&](const Tensor& t, size_t) {
    return is_device(t) || t.dim() > 0 ? as_meta(t) : t;
  });
  BelowAutograd below;
  const c10::DispatchKeySet meta(c10::DispatchKey::Meta);
  if (traits.shape_rule) traits.shape_rule->callBoxed(op, meta, &arguments);
  else op.redispatchBoxed(meta, &arguments);
  return {std::move(stands), false};
}

// The last resort for an operator without a shape rule: its CPU kernel, on zeros.
Outcome run_on_zeros(const c10::OperatorHandle& op, const Traits& traits, Stack& arguments) {
  auto stands = replace(traits, arguments, c10::DeviceType::CPU, [&](const Tensor& t, size_t) {
    if (!is_device(t)) return t;
    Tensor zeros(at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type()));
    if (zeros.numel()) std::memset(zeros.mutable_data_ptr(), 0, zeros.storage().nbytes());
    return zeros;
  });
  BelowAutograd below;
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "The virtual GPU cannot run ", op.operator_name(),
      ": it has neither a shape rule (a Meta kernel) nor a kernel for the CPU to learn the shape from.");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  return {std::move(stands), false};
}

void tell_unmodelled(const c10::OperatorHandle& op, const std::string& why) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject* done = PyObject_CallFunction(on_unmodelled, "ss", c10::toString(op.operator_name()).c_str(), why.c_str());
  if (!done) PyErr_WriteUnraisable(on_unmodelled);
  Py_XDECREF(done);
  PyGILState_Release(state);
}

// Nothing is asked of a slow shape rule where the answer is plain.
bool needs_no_rule(const Traits& traits, Stack& arguments) {
  if (traits.shape_rule || !traits.in_place) return false;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (traits.written[i]) for_tensors(arguments[i], [](const Tensor& t) { forget(t); });
  arguments.resize(arguments[0].isTensor() ? 1 : 0);
  return true;
}

// What a list of dense floating-point tensors is mapped to is alike, whatever the other operands.
bool map_each(const Traits& traits, Stack& arguments) {
  if (!traits.each_alike) return false;
  bool plain = true;
  for (const auto& value : arguments)
    for_tensors(value, [&](const Tensor& t) {
      plain &= is_device(t) && at::isFloatingType(t.scalar_type()) && t.is_non_overlapping_and_dense();
    });
  const auto inputs = arguments[0].toTensorVector();
  for (size_t i = 1; i < arguments.size() && plain; ++i) {
    if (!arguments[i].isTensorList()) continue;
    const auto others = arguments[i].toTensorVector();
    for (size_t k = 0; k < others.size() && plain; ++k)
      plain &= others.size() == inputs.size() && others[k].sizes() == inputs[k].sizes() &&
               others[k].scalar_type() == inputs[k].scalar_type();
  }
  if (!plain) return false;
  c10::List<Tensor> outputs;
  for (const Tensor& t : inputs) outputs.push_back(device_empty_strided(t.sizes(), t.strides(), t.scalar_type()));
  arguments = {IValue(std::move(outputs))};
  return true;
}

Outcome learn(const c10::OperatorHandle& op, const Traits& traits, Stack& arguments) {
  if (values_are_known(traits, arguments)) {
    Stack attempt(arguments);
    try {
      Outcome outcome = run_on_values(op, traits, attempt);
      arguments = std::move(attempt);
      return outcome;
    } catch (const c10::NotImplementedError&) {
    }
  }
  if (map_each(traits, arguments) || needs_no_rule(traits, arguments)) return {{}, false};
  Stack attempt(arguments);
  try {
    Outcome outcome = run_on_shapes(op, traits, attempt);
    arguments = std::move(attempt);
    return outcome;
  } catch (const c10::NotImplementedError& missing) {
    tell_unmodelled(op, missing.what_without_backtrace());
    return run_on_zeros(op, traits, arguments);
  }
}

void use_library(const char* library) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject* done = PyObject_CallFunction(on_library, "s", library);
  if (!done) {
    try { rethrow_python_error(); } catch (...) { PyGILState_Release(state); throw; }
  }
  Py_DECREF(done);
  PyGILState_Release(state);
}

// A library's workspace is asked for once per thread and stream; after that nobody needs to be told.
void use_library_once(const char* library, int device) {
  thread_local std::unordered_set<std::string> seen;
  const auto where = std::to_string(current_session()) + "/" + std::to_string(device) + "/" + std::to_string(current_stream_id(device));
  if (seen.insert(std::string(library) + "/" + where).second)
    use_library(library);
}

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Traits& traits = traits_of(op);
  const size_t count = traits.written.size();
  Stack arguments(std::make_move_iterator(stack->end() - count), std::make_move_iterator(stack->end()));
  stack->erase(stack->end() - count, stack->end());
  Outcome outcome = learn(op, traits, arguments);
  for (const auto& stand : outcome.stands) {
    if (!stand.written) continue;
    if (is_device(stand.original)) follow_resize(stand.original, stand.stand);
    if (!outcome.known) forget(stand.original);
    else if (is_device(stand.original) && !is_known(stand.original)) adopt_shadow(stand.original, stand.stand);
  }
  for (const auto& result : arguments)
    stack->push_back(map_tensors(result, [&](const Tensor& t) { return bring_back(t, outcome.stands, outcome.known); }));
  if (traits.library) use_library_once(traits.library, 0);
}

// An operator that is not PyTorch's own: its outputs are known, what its kernel allocates inside is not.
void compute_foreign(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  tell_unmodelled(op, "no CUDA kernel is known here: outputs are counted, what it allocates inside is not");
  compute(op, keys, stack);
}

// ---- operators that are not a matter of shapes ----------------------------------------------------------------------------------

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  Describe as(size, at::dtype_or_default(dtype));
  return Tensor(at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                          at::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return device_empty_strided(size, stride, at::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  Tensor shape(at::detail::empty_meta(size, self.scalar_type(), format));
  const size_t before = self.storage().nbytes();
  follow_resize(self, shape);
  if (self.storage().nbytes() != before) forget(self);
  return self;
}

// As CUDA's copy does: between host and device only contiguous runs of one type travel, anything else through a temporary.
bool travels_directly(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         ((a.is_contiguous() && b.is_contiguous()) || (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}

void tell_unknown_read(const Tensor& to) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject* done = PyObject_CallFunction(on_unknown, "sL", c10::toString(to.scalar_type()), (long long)to.numel());
  if (!done) PyErr_WriteUnraisable(on_unknown);
  Py_XDECREF(done);
  PyGILState_Release(state);
}

void read_values(const Tensor& to, const Tensor& from) {
  if (is_known(from) && from.numel() > 0 && block_of(from)) {
    BelowAutograd below;
    Tensor(to).copy_(shadow_of(from));
    return;
  }
  if (to.numel() == 0) return;
  tell_unknown_read(to);
  if (to.storage().nbytes() >= (1 << 20)) return mark_valueless(to.storage().data());
  BelowAutograd below;
  Tensor(to).fill_(1);
}

void write_values(const Tensor& to, const Tensor& from) {
  const bool partial = !covers_storage(to);
  if (is_valueless(from.storage().data()) || !small_enough(to.numel(), to.scalar_type()) || (partial && !is_known(to)) ||
      !prepare_shadow(to))
    return forget(to);
  if (!block_of(to)) return;
  BelowAutograd below;
  shadow_of(to).copy_(from);
}

void copy_values_on_device(const Tensor& to, const Tensor& from) {
  if (!is_known(from) || from.numel() == 0) return from.numel() ? forget(to) : void();
  write_values(to, shadow_of(from));
}

Tensor& copy_(Tensor& self, const Tensor& src_, bool non_blocking) {
  if (self.is_same(src_)) return self;
  Tensor src = src_.sizes() == self.sizes() ? src_ : src_.expand_as(self);
  if (is_device(self) && is_device(src)) {
    copy_values_on_device(self, src);
    return self;
  }
  BelowAutograd below;
  if (!travels_directly(self, src) && self.numel() > 0) {
    const bool convert_on_device = is_device(self) || non_blocking;
    const bool direct = self.is_contiguous() && (convert_on_device || self.scalar_type() == src.scalar_type());
    Tensor to = direct ? self
                       : at::empty_like(self, self.options().dtype(convert_on_device ? self.scalar_type() : src.scalar_type()),
                                        at::MemoryFormat::Contiguous);
    Tensor from = (convert_on_device ? src_.to(self.scalar_type()) : src_).expand_as(self).contiguous();
    if (!to.is_same(self) || !from.is_same(src)) {
      to.copy_(from, non_blocking);
      if (!to.is_same(self)) self.copy_(to, non_blocking);
      return self;
    }
  }
  is_device(self) ? write_values(self, src) : read_values(self, src);
  if (!non_blocking) synchronize();
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  if (is_known(self) && block_of(self)) return shadow_of(self).item();
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject* got = PyObject_CallFunction(on_unknown, "sL", c10::toString(self.scalar_type()), (long long)-1);
  const double value = got && got != Py_None ? PyFloat_AsDouble(got) : 0.0;
  if (!got || PyErr_Occurred()) PyErr_WriteUnraisable(on_unknown);
  Py_XDECREF(got);
  PyGILState_Release(state);
  if (self.scalar_type() == at::kBool) return value != 0.0;
  if (at::isIntegralType(self.scalar_type(), false)) return static_cast<int64_t>(value);
  return value;
}

// The mask is made before the output.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& self, double p, std::optional<bool> train) {
  BelowAutograd below;
  const bool copies = train.has_value() && !*train;
  Tensor output = copies ? self.clone() : Tensor();
  Tensor mask = at::empty_like(self, self.options().dtype(at::kBool));
  if (!copies) output = at::empty_like(self);
  return {output, mask};
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> strides = stride.vec();
  if (strides.empty() && !size.empty()) {
    const auto contiguous = c10::contiguous_strides(size);
    strides.assign(contiguous.begin(), contiguous.end());
  }
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const int64_t numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {numel}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return set_storage(self, std::move(none), 0, {0}, {1});
}

// ---- the host: tensors whose values nobody needs are not computed --------------------------------------------------------------

bool is_large_float(const Tensor& t) {
  return t.defined() && t.has_storage() && t.device().is_cpu() && at::isFloatingType(t.scalar_type()) &&
         t.storage().nbytes() >= (1 << 20);
}

std::unordered_map<std::string, c10::SafeKernelFunction>& host_kernels() {
  static auto* kernels = new std::unordered_map<std::string, c10::SafeKernelFunction>;
  return *kernels;
}

void host_plain(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  host_kernels().at(c10::toString(op.operator_name())).callBoxed(op, keys, stack);
}

// normal_ and kin: a large tensor is left unwritten and remembered as valueless.
void host_fill(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Tensor self = (stack->end() - count)->toTensor();
  if (!is_large_float(self) || !covers_storage(self)) return host_plain(op, keys, stack);
  mark_valueless(self.storage().data());
  stack->erase(stack->end() - count, stack->end());
  stack->push_back(self);
}

// What is computed from valueless tensors alone (besides scalars) is valueless.
void host_derive(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  bool any = false, all = true;
  for (auto value = stack->end() - count; value != stack->end(); ++value)
    for_tensors(*value, [&](const Tensor& t) {
      if (!t.defined() || t.dim() == 0) return;
      const bool valueless = is_large_float(t) && is_valueless(t.storage().data());
      any |= valueless;
      all &= valueless || !t.device().is_cpu();
    });
  if (!any || !all) return host_plain(op, keys, stack);
  const Traits& traits = traits_of(op);
  Stack arguments(stack->end() - count, stack->end());
  auto stands = replace(traits, arguments, c10::DeviceType::Meta, [](const Tensor& t, size_t) { return t.dim() ? as_meta(t) : t; });
  {
    BelowAutograd below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &arguments);
  }
  stack->erase(stack->end() - count, stack->end());
  for (const auto& result : arguments)
    stack->push_back(map_tensors(result, [&](const Tensor& t) {
      for (const auto& stand : stands) if (stand.stand.is_same(t)) return stand.original;
      Tensor fresh(at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type()));
      if (is_large_float(fresh)) mark_valueless(fresh.storage().data());
      else if (fresh.numel()) std::memset(fresh.mutable_data_ptr(), 0, fresh.storage().nbytes());
      return fresh;
    }));
}

void host_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  Tensor self = (stack->end() - 3)->toTensor();
  const Tensor source = (stack->end() - 2)->toTensor();
  const bool skip = is_large_float(self) && is_large_float(source) && is_valueless(source.storage().data());
  if (!skip) return host_plain(op, keys, stack);
  if (covers_storage(self)) mark_valueless(self.storage().data());
  stack->erase(stack->end() - 3, stack->end());
  stack->push_back(self);
}

// PyTorch warns when a kernel takes another's place; here that is the point.
struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::vector<std::unique_ptr<torch::Library>>& registrations() {
  static auto* all = new std::vector<std::unique_ptr<torch::Library>>;
  return *all;
}

torch::Library& library(c10::DispatchKey key, const char* space = "aten") {
  registrations().push_back(std::make_unique<torch::Library>(
      torch::Library::IMPL, space, std::make_optional(key), __FILE__, static_cast<uint32_t>(__LINE__)));
  return *registrations().back();
}

// ---- autocast -----------------------------------------------------------------------------------------------------------------------

// PyTorch casts the arguments of such a call in the order in which the compiler evaluates them: on x86-64, where it runs
// with CUDA, the last one first. The order decides which copy is made first and which dies first in backward.
void autocast_to(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::Autocast);
  const size_t count = op.schema().arguments().size();
  for (size_t i = 1; i <= count; ++i) {
    IValue& value = *(stack->end() - i);
    value = map_tensors(value, [&](const Tensor& t) {
      return t.defined() ? at::autocast::cached_cast(dtype, t, c10::DeviceType::CUDA) : t;
    });
  }
  op.callBoxed(stack);
}

void autocast_lower(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  autocast_to(op, stack, at::autocast::get_lower_precision_fp_from_device_type(c10::DeviceType::CUDA));
}

void autocast_float(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  autocast_to(op, stack, at::kFloat);
}

void register_autocast() {
  static Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& autocast = library(c10::DispatchKey::AutocastCUDA);
#define NAME_1(name) #name
#define NAME_2(name, overload) #name "." #overload
#define PICK(_1, _2, which, ...) which
#define NAME(...) PICK(__VA_ARGS__, NAME_2, NAME_1, )(__VA_ARGS__)
#define LOWER(...) autocast.impl(NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&autocast_lower>());
#define FLOAT(...) autocast.impl(NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&autocast_float>());
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
}

// ---- CUDA's choices that live in dispatch stubs: each is one operator of this project's, written in Python --------------------------

template <class Signature, class... Arguments>
auto call(const char* name, Arguments&&... arguments) {
  static std::unordered_map<std::string, c10::OperatorHandle> found;
  static std::mutex lock;
  c10::OperatorHandle* handle;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto it = found.find(name);
    if (it == found.end()) it = found.emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
    handle = &it->second;
  }
  return handle->typed<Signature>().call(std::forward<Arguments>(arguments)...);
}

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool causal, std::optional<double> scale, bool grouped) {
  return call<int64_t(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                      std::optional<double>, bool)>(
      "tonnage::choose_attention", query, key, value, mask, dropout, causal, scale, grouped);
}

std::tuple<Tensor, Tensor> convolution_backward(
    const Tensor& input, const Tensor& grad, const Tensor& weight, at::IntArrayRef padding, at::IntArrayRef stride,
    at::IntArrayRef dilation, int64_t groups, bool benchmark, bool deterministic, bool tf32, std::array<bool, 2> mask) {
  return call<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef,
                                         at::IntArrayRef, int64_t, bool, bool, bool, bool, bool)>(
      "tonnage::cudnn_convolution_backward", input, grad, weight, padding, stride, dilation, groups, benchmark, deterministic,
      tf32, mask[0], mask[1]);
}

std::tuple<Tensor, Tensor> convolution_transpose_backward(
    const Tensor& input, const Tensor& grad, const Tensor& weight, at::IntArrayRef padding, at::IntArrayRef output_padding,
    at::IntArrayRef stride, at::IntArrayRef dilation, int64_t groups, bool benchmark, bool deterministic, bool tf32,
    std::array<bool, 2> mask) {
  return call<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef,
                                         at::IntArrayRef, at::IntArrayRef, int64_t, bool, bool, bool, bool, bool)>(
      "tonnage::cudnn_convolution_transpose_backward", input, grad, weight, padding, output_padding, stride, dilation, groups,
      benchmark, deterministic, tf32, mask[0], mask[1]);
}

std::tuple<Tensor, Tensor> depthwise2d_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef kernel, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, std::array<bool, 2> mask) {
  Tensor to_weight = mask[1] ? at::empty_like(weight) : Tensor();
  Tensor to_input = mask[0] ? at::empty_like(input, at::MemoryFormat::Contiguous) : Tensor();
  return {to_input, to_weight};
}

std::tuple<Tensor, Tensor, Tensor> dilated_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
    at::IntArrayRef, std::array<bool, 3> mask) {
  Tensor to_bias = mask[2] ? at::empty({grad.size(1)}, grad.options()) : Tensor();
  return {mask[0] ? at::empty_like(input) : Tensor(), mask[1] ? at::empty_like(weight) : Tensor(), to_bias};
}

// cuDNN's recurrent networks: parameters are gathered into one buffer, then one call computes all layers.
using Rnn = std::tuple<Tensor, Tensor, Tensor>;

Rnn recurrent(int64_t mode, const Tensor& input, const Tensor& batch_sizes, const Tensor& hx, const Tensor& cx,
              at::TensorList weights, bool biases, int64_t layers, double dropout, bool train, bool bidirectional,
              bool batch_first) {
  return call<Rnn(int64_t, const Tensor&, const std::optional<Tensor>&, const Tensor&, const std::optional<Tensor>&,
                  at::TensorList, bool, int64_t, double, bool, bool, bool)>(
      "tonnage::cudnn_rnn", mode, input, batch_sizes.defined() ? std::optional<Tensor>(batch_sizes) : std::nullopt, hx,
      cx.defined() ? std::optional<Tensor>(cx) : std::nullopt, weights, biases, layers, dropout, train, bidirectional, batch_first);
}

void lstm(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input, at::TensorList hx, at::TensorList weights, bool biases,
          int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  std::tie(output, hy, cy) = recurrent(2, input, {}, hx[0], hx[1], weights, biases, layers, dropout, train, bidirectional, batch_first);
}

void lstm_packed(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& data, const Tensor& batch_sizes, at::TensorList hx,
                 at::TensorList weights, bool biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  std::tie(output, hy, cy) = recurrent(2, data, batch_sizes, hx[0], hx[1], weights, biases, layers, dropout, train, bidirectional, false);
}

template <int mode>
void rnn(Tensor& output, Tensor& hy, const Tensor& input, const Tensor& hx, at::TensorList weights, bool biases,
         int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  std::tie(output, hy, std::ignore) =
      recurrent(mode, input, {}, hx, {}, weights, biases, layers, dropout, train, bidirectional, batch_first);
}

template <int mode>
void rnn_packed(Tensor& output, Tensor& hy, const Tensor& data, const Tensor& batch_sizes, const Tensor& hx,
                at::TensorList weights, bool biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  std::tie(output, hy, std::ignore) =
      recurrent(mode, data, batch_sizes, hx, {}, weights, biases, layers, dropout, train, bidirectional, false);
}

void register_stubs() {
  using namespace at::native;
  _fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  cudnn_convolution_backward_stub.set_cuda_dispatch_ptr(&convolution_backward);
  cudnn_convolution_transpose_backward_stub.set_cuda_dispatch_ptr(&convolution_transpose_backward);
  conv_depthwise2d_backward_stub.set_cuda_dispatch_ptr(&depthwise2d_backward);
  conv_depthwise3d_backward_stub.set_cuda_dispatch_ptr(&dilated_backward);
  slow_conv_dilated2d_backward_stub.set_cuda_dispatch_ptr(&dilated_backward);
  slow_conv_dilated3d_backward_stub.set_cuda_dispatch_ptr(&dilated_backward);
  lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm);
  lstm_packed_cudnn_stub.set_cuda_dispatch_ptr(&lstm_packed);
  rnn_relu_cudnn_stub.set_cuda_dispatch_ptr(&rnn<0>);
  rnn_tanh_cudnn_stub.set_cuda_dispatch_ptr(&rnn<1>);
  gru_cudnn_stub.set_cuda_dispatch_ptr(&rnn<3>);
  rnn_relu_packed_cudnn_stub.set_cuda_dispatch_ptr(&rnn_packed<0>);
  rnn_tanh_packed_cudnn_stub.set_cuda_dispatch_ptr(&rnn_packed<1>);
  gru_packed_cudnn_stub.set_cuda_dispatch_ptr(&rnn_packed<3>);
}

void register_native(torch::Library& aten) {
  aten.impl("empty.memory_format", TORCH_FN(empty));
  aten.impl("empty_strided", TORCH_FN(empty_strided));
  aten.impl("resize_", TORCH_FN(resize_));
  aten.impl("copy_", TORCH_FN(copy_));
  aten.impl("native_dropout", TORCH_FN(native_dropout));
  aten.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  aten.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  aten.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  aten.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  aten.impl("set_", TORCH_FN(set_empty));
}

template <class F>
void each_line(const char* text, F&& f) {
  std::string names(text);
  for (size_t start = 0; start < names.size();) {
    size_t end = names.find('\n', start);
    if (end == std::string::npos) end = names.size();
    if (end > start) f(names.substr(start, end - start));
    start = end + 1;
  }
}

void override_host(torch::Library& aten, const std::string& name, torch::CppFunction function) {
  const auto dot = name.find('.');
  const std::string base = "aten::" + name.substr(0, dot);
  auto op = c10::Dispatcher::singleton().findSchema({base, dot == std::string::npos ? "" : name.substr(dot + 1)});
  if (!op) return;
  host_kernels().emplace(c10::toString(op->operator_name()), op->getComputedKernelForDispatchKey(c10::DispatchKey::CPU));
  aten.impl(name.c_str(), std::move(function));
}

}  // namespace

extern "C" {

void tonnage_listen(PyObject* unknown, PyObject* unmodelled, PyObject* library) {
  for (PyObject* callback : {unknown, unmodelled, library}) Py_INCREF(callback);
  on_unknown = unknown;
  on_unmodelled = unmodelled;
  on_library = library;
}

// To be called before torch is imported; see native_shape_rules.
void tonnage_keep_shape_rules() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::Meta))
      native_shape_rules().emplace(c10::toString(name), op->getComputedKernelForDispatchKey(c10::DispatchKey::Meta));
  }
}

// `computed`: operators (one a line) that run through `compute` on the CUDA key; `plain`: all that CUDA implements, which
// a Python kernel may ask for by redispatching to kPlain.
void tonnage_register(const char* computed, const char* plain) {
  auto& device = library(c10::DispatchKey::CUDA);
  register_native(device);
  each_line(computed, [&](const std::string& name) {
    device.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  });
  auto& spare = library(kPlain);
  each_line(plain, [&](const std::string& name) {
    spare.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  });
  register_stubs();
  register_autocast();
}

void tonnage_register_fallback() {
  registrations().push_back(std::make_unique<torch::Library>(
      torch::Library::IMPL, "_", std::make_optional(c10::DispatchKey::CUDA), __FILE__, static_cast<uint32_t>(__LINE__)));
  registrations().back()->fallback(torch::CppFunction::makeFromBoxedFunction<&compute_foreign>());
}

void tonnage_register_host(const char* fills, const char* derives) {
  static Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& host = library(c10::DispatchKey::CPU);
  each_line(fills, [&](const std::string& name) {
    override_host(host, name, torch::CppFunction::makeFromBoxedFunction<&host_fill>());
  });
  each_line(derives, [&](const std::string& name) {
    override_host(host, name, torch::CppFunction::makeFromBoxedFunction<&host_derive>());
  });
  override_host(host, "copy_", torch::CppFunction::makeFromBoxedFunction<&host_copy>());
}

// "name library" a line; and the operators whose values are never worked out.
void tonnage_set_libraries(const char* pairs, const char* without_values) {
  each_line(pairs, [&](const std::string& line) {
    const auto space = line.find(' ');
    libraries[line.substr(0, space)] = line.substr(space + 1);
  });
  each_line(without_values, [&](const std::string& name) { valueless_operators.insert(name); });
}

}  // extern "C"
}  // namespace tonnage
