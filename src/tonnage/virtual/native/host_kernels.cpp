// Kernels of the CPU key for large tensors whose values nobody needs: the weights of a model that is built here and then
// moved to the device. They are neither computed nor committed.
#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <mutex>

#include "../driver/native/draws.c"

namespace tonnage {
namespace {

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

// The generator goes on as after the numbers that an unwritten tensor would have taken. A small tensor that ends as it does is
// filled, as ends are drawn twice or in part; the rest is passed over.
void draw_unwritten(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const Tensor& self) {
  constexpr int64_t few = 1 << 10;
  const int64_t filled = few + self.numel() % few, words = self.scalar_type() == at::kDouble ? 2 : 1;
  const auto given = stack->back().toOptional<at::Generator>();
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(given, at::detail::getDefaultCPUGenerator());
  {
    std::lock_guard<std::mutex> guard(generator->mutex_);
    at::mt19937 engine = generator->engine();
    auto data = engine.data();
    tn_pass_over(data.state_.data(), &data.left_, &data.next_, words * (self.numel() - filled));
    engine.set_data(data);
    generator->set_engine(engine);
  }
  *(stack->end() - op.schema().arguments().size()) = Tensor(at::detail::empty_cpu({filled}, self.scalar_type()));
  host_plain(op, keys, stack);
  stack->pop_back();
}

// normal_ and kin: while a virtual GPU is open, a large tensor is left unwritten and remembered as valueless.
void host_fill(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Tensor self = (stack->end() - count)->toTensor();
  if (!is_open() || !is_large_float(self) || !covers_storage(self)) return host_plain(op, keys, stack);
  mark_valueless(self.storage().data());
  // the other distributions take numbers by rules of their own: the generator goes on as if nothing had been drawn
  const bool counted = op.schema().name() == "aten::normal_" || op.schema().name() == "aten::uniform_";
  if (counted && self.is_contiguous()) draw_unwritten(op, keys, stack, self);
  else stack->erase(stack->end() - count, stack->end());
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
  if (!skip) {
    if (source.device().is_cpu()) tell_host_read(kHostRead, source);
    return host_plain(op, keys, stack);
  }
  if (covers_storage(self)) mark_valueless(self.storage().data());
  stack->erase(stack->end() - 3, stack->end());
  stack->push_back(self);
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

void register_host_fill(torch::Library& aten, const std::string& name) {
  override_host(aten, name, torch::CppFunction::makeFromBoxedFunction<&host_fill>());
}

void register_host_derive(torch::Library& aten, const std::string& name) {
  override_host(aten, name, torch::CppFunction::makeFromBoxedFunction<&host_derive>());
}

void register_host_copy(torch::Library& aten) {
  override_host(aten, "copy_", torch::CppFunction::makeFromBoxedFunction<&host_copy>());
}

}  // namespace tonnage
