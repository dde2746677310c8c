// Operators that are not a matter of shapes: making tensors, moving bytes, reading values.
#include "kernels.h"

#include <ATen/native/Resize.h>
#include <ATen/ops/empty_like.h>

namespace tonnage {
namespace {

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

// Of values that were assumed, one is told, too.
void tell_unknown_read(const Tensor& to, bool guessed) {
  PyGILState_STATE state = PyGILState_Ensure();
  const char* type = c10::toString(to.scalar_type());
  PyObject* done = guessed ? PyObject_CallFunction(listeners.unknown, "sLd", type, (long long)to.numel(), 1.0)
                           : PyObject_CallFunction(listeners.unknown, "sL", type, (long long)to.numel());
  if (!done) tell_unraisable(listeners.unknown);
  Py_XDECREF(done);
  PyGILState_Release(state);
}

void read_values(const Tensor& to, const Tensor& from) {
  if (is_known(from) && from.numel() > 0 && block_of(from)) {
    BelowAutograd below;
    Tensor(to).copy_(shadow_of(from));
    if (is_guessed(from)) tell_unknown_read(to, true);
    return;
  }
  if (to.numel() == 0) return;
  tell_unknown_read(to, false);
  if (to.storage().nbytes() >= (1 << 20)) return mark_valueless(to.storage().data());
  BelowAutograd below;
  Tensor(to).fill_(1);
}

void write_values(const Tensor& to, const Tensor& from) {
  const bool partial = !covers_storage(to);
  if (is_valueless(from.storage().data()) || !small_enough(to.numel(), to.scalar_type()) || (partial && !is_known(to)) ||
      !prepare_shadow(to)) {
    forget(to);
    if (!partial && to.scalar_type() == at::kBool && !is_valueless(from.storage().data())) assume_share(to, from);
    return;
  }
  if (!block_of(to)) return;
  BelowAutograd below;
  shadow_of(to).copy_(from);
  if (!partial) block_of(to)->guess = false;
}

void copy_values_on_device(const Tensor& to, const Tensor& from) {
  if (from.numel() == 0) return;
  if (is_known(from)) {
    const bool guessed = is_guessed(from);
    write_values(to, shadow_of(from));
    if (guessed) mark_guessed(to);
    return;
  }
  const int32_t law = law_of(from);
  forget(to);
  if (law && covers_storage(to)) copy_law(to, law);
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
  if (is_device(self)) tell_host_read(kHostSent, src);
  is_device(self) ? write_values(self, src) : read_values(self, src);
  if (!non_blocking) synchronize();
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  const bool known = is_known(self) && block_of(self);
  if (known && !is_guessed(self)) return shadow_of(self).item();
  const double guess = known ? shadow_of(self).item().toDouble() : 0.0;
  PyGILState_STATE state = PyGILState_Ensure();
  const char* type = c10::toString(self.scalar_type());
  PyObject* got = known ? PyObject_CallFunction(listeners.unknown, "sLd", type, (long long)-1, guess)
                        : PyObject_CallFunction(listeners.unknown, "sL", type, (long long)-1);
  const double value = got && got != Py_None ? PyFloat_AsDouble(got) : 0.0;
  if (!got || PyErr_Occurred()) {
    Py_XDECREF(got);
    try { rethrow_python_error(); } catch (...) { PyGILState_Release(state); throw; }
  }
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

}  // namespace

void register_tensors(torch::Library& aten) {
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

}  // namespace tonnage
