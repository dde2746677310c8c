// The generic kernel of the CUDA dispatch key, which computes shapes instead of values.
//
// Almost every operator goes through `compute`: it runs the operator's own Meta kernel to learn what comes out and then
// allocates that on the virtual device. Where all inputs have known values it runs the CPU kernel on them instead, so
// that the outputs are known too. What a CUDA kernel allocates besides its outputs is not known here: those operators
// are written in Python (../kernels) and come back to `compute` through a key of their own.
#include "kernels.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_set>

namespace tonnage {
namespace {

std::mutex traits_lock;
std::unordered_map<std::string, std::string> libraries;

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
  auto rule = native_shape_rules().find(c10::toString(op.operator_name()));
  if (rule != native_shape_rules().end()) traits.shape_rule = &rule->second;
  traits.in_place = only_writes(op, traits);
  traits.each_alike = maps_each_alike(schema.name());
  return traits;
}

}  // namespace

const Traits& traits_of(const c10::OperatorHandle& op) {
  static std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Traits>> known;
  std::lock_guard<std::mutex> guard(traits_lock);
  auto& slot = known[&op.schema()];
  if (!slot) slot = std::make_unique<Traits>(inspect(op));
  return *slot;
}

void name_library(const std::string& op, const std::string& library) { libraries[op] = library; }

// Before torch is imported, or while its rules in Python are lifted off; see native_shape_rules.
void keep_shape_rules() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::Meta))
      native_shape_rules().emplace(c10::toString(name), op->getComputedKernelForDispatchKey(c10::DispatchKey::Meta));
  }
}

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

namespace {

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
  if (traits.random) return false;
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
  Unrecorded unrecorded;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  return {std::move(stands), true};
}

Outcome run_on_shapes(const c10::OperatorHandle& op, const Traits& traits, Stack& arguments) {
  auto stands = replace(traits, arguments, c10::DeviceType::Meta, [&](const Tensor& t, size_t) {
    return is_device(t) || t.dim() > 0 ? as_meta(t) : t;
  });
  BelowAutograd below;
  Unrecorded unrecorded;
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
  Unrecorded unrecorded;
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "The virtual GPU cannot run ", op.operator_name(),
      ": it has neither a shape rule (a Meta kernel) nor a kernel for the CPU to learn the shape from.");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  return {std::move(stands), false};
}

void tell_unmodelled(const c10::OperatorHandle& op, const std::string& why) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject* done = PyObject_CallFunction(listeners.unmodelled, "ss", c10::toString(op.operator_name()).c_str(), why.c_str());
  if (!done) tell_unraisable(listeners.unmodelled);
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
  PyObject* done = PyObject_CallFunction(listeners.library, "s", library);
  if (!done) {
    try { rethrow_python_error(); } catch (...) { PyGILState_Release(state); throw; }
  }
  Py_DECREF(done);
  PyGILState_Release(state);
}

// A library's workspace is asked for once per thread and stream; after that nobody needs to be told.
void use_library_once(const char* library) {
  thread_local std::unordered_set<std::string> seen;
  const auto where = std::to_string(current_session()) + "/" + std::to_string(current_stream_id(0));
  if (seen.insert(std::string(library) + "/" + where).second)
    use_library(library);
}

}  // namespace

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Traits& traits = traits_of(op);
  const size_t count = traits.written.size();
  Stack arguments(std::make_move_iterator(stack->end() - count), std::make_move_iterator(stack->end()));
  stack->erase(stack->end() - count, stack->end());
  std::optional<LawQuestion> question;
  if (involves_law(traits, arguments)) question.emplace(traits, arguments);
  bool guessed = false;
  if (some_are_guessed)
    for (const auto& value : arguments) for_tensors(value, [&](const Tensor& t) { guessed |= is_guessed(t); });
  Outcome outcome = learn(op, traits, arguments);
  for (const auto& stand : outcome.stands) {
    if (!stand.written) continue;
    if (is_device(stand.original)) follow_resize(stand.original, stand.stand);
    if (!outcome.known) forget(stand.original);
    else if (is_device(stand.original) && !is_known(stand.original)) adopt_shadow(stand.original, stand.stand);
    if (outcome.known && guessed) mark_guessed(stand.original);
  }
  for (const auto& result : arguments)
    stack->push_back(map_tensors(result, [&](const Tensor& t) {
      Tensor made = bring_back(t, outcome.stands, outcome.known);
      if (outcome.known && guessed) mark_guessed(made);
      return made;
    }));
  if (question && !outcome.known && arguments.size() == 1 && stack->back().isTensor()) question->tell(op, stack->back().toTensor());
  if (traits.library) use_library_once(traits.library);
}

// An operator that is not PyTorch's own: its outputs are known, what its kernel allocates inside is not.
void compute_foreign(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  tell_unmodelled(op, "no CUDA kernel is known here: outputs are counted, what it allocates inside is not");
  compute(op, keys, stack);
}

}  // namespace tonnage
