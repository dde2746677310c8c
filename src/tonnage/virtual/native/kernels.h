// What the kernels share: tensors of the device and their known values, stacks of arguments, and the generic kernel.
#pragma once
#include <Python.h>

#include "bridge.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tonnage {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr int64_t kKnownIntegers = 1 << 20;   // elements whose values are kept, of integers and booleans
constexpr int64_t kKnownFloats = 1 << 17;     // and of floating point

// Python's ears.
struct Listeners {
  PyObject* unknown = nullptr;      // a value was read that nobody knows
  PyObject* unmodelled = nullptr;   // an operator has no shape rule
  PyObject* library = nullptr;      // a library's handle is used: its workspace may be due
  PyObject* laws = nullptr;         // a result depends on values of which only a law is known
};
extern Listeners listeners;

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView guard;
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::DispatchKeySet(c10::DispatchKey::Python)};
  c10::impl::ExcludeDispatchKeyGuard no_snapshot{c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot)};
};

// What is worked out on the host is no call of the script's: a profiler need not see it.
struct Unrecorded {
  std::optional<at::RecordFunctionGuard> guard;
  Unrecorded() { if (at::hasThreadLocalCallbacks()) guard.emplace(false); }
};

// ---- tensors and what is known of their values (values.cpp) ----------------------------------------------------------

bool is_device(const Tensor& t);
Tensor device_empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);
Tensor as_meta(const Tensor& t);
Tensor shadow_of(const Tensor& t);
Tensor view_like(const Tensor& base, const Tensor& geometry);
bool small_enough(int64_t numel, at::ScalarType dtype);
bool is_known(const Tensor& t);
bool covers_storage(const Tensor& t);
void forget(const Tensor& t);
bool prepare_shadow(const Tensor& t);
void adopt_shadow(const Tensor& t, const Tensor& values);
bool is_guessed(const Tensor& t);  // whether its known values were assumed
void mark_guessed(const Tensor& t);

// ---- what is assumed of values that nobody computed (laws.cpp) -------------------------------------------------------

int32_t law_of(const Tensor& t);
void copy_law(const Tensor& to, int32_t law);
void assume_share(const Tensor& to, const Tensor& mask);

// ---- operators (compute.cpp) --------------------------------------------------------------------------------------------

struct Traits {
  std::vector<bool> written;      // per argument: annotated as mutated
  std::vector<bool> out;          // per argument: mutated and given by keyword, so its old value is never read
  bool random = false;
  bool overwrites = false;        // in place, but never reads what it overwrites; its arguments give a law
  const char* library = nullptr;  // "cublas", ...: whose workspace it needs
  bool in_place = false;          // only writes into its arguments: there is nothing to allocate
  bool each_alike = false;        // a list in, a list of the same shapes out
  const c10::SafeKernelFunction* shape_rule = nullptr;   // PyTorch's own in C++, where there is one
};

const Traits& traits_of(const c10::OperatorHandle& op);
void name_library(const std::string& op, const std::string& library);
void keep_shape_rules();
bool involves_law(const Traits& traits, const Stack& arguments);
void follow_resize(const Tensor& original, const Tensor& stand);
void compute(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);
void compute_foreign(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

// The operands of one call, as ../laws.py reads them: taken before the call, told after it.
class LawQuestion {
 public:
  LawQuestion(const Traits& traits, const Stack& arguments);
  ~LawQuestion();
  LawQuestion(const LawQuestion&) = delete;
  void tell(const c10::OperatorHandle& op, const Tensor& result);

 private:
  PyObject* operands_;
  int64_t numel_ = 0;
};

// ---- registration -------------------------------------------------------------------------------------------------------

void register_tensors(torch::Library& aten);                                                        // tensors.cpp
void register_host_fill(torch::Library& aten, const std::string& name);                             // host_kernels.cpp
void register_host_derive(torch::Library& aten, const std::string& name);
void register_host_copy(torch::Library& aten);
void register_sparse(torch::Library& aten, const std::string& name);                                // layouts.cpp
void register_nested(torch::Library& aten, const std::string& name);
void register_sparse_products(torch::Library& aten);

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

inline IValue elsewhere(const IValue& value, c10::DeviceType where) {
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

}  // namespace tonnage
