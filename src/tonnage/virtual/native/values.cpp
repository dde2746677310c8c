// Tensors on the virtual device, and the real bytes behind those whose values are known (see Block::shadow).
#include "kernels.h"

#include <c10/core/CPUAllocator.h>

namespace tonnage {

Listeners listeners;

bool is_device(const Tensor& t) { return t.defined() && t.device().type() == c10::DeviceType::CUDA; }

Tensor device_empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  Describe as(sizes, dtype);
  return Tensor(at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
}

static Tensor with_geometry_of(const Tensor& t, c10::Storage storage, c10::DispatchKeySet keys) {
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
  if (Block* block = block_of(t)) {
    block->shadow = c10::Storage();
    block->law = 0;
    block->guess = false;
  }
}

bool is_guessed(const Tensor& t) {
  const Block* block = t.defined() && is_device(t) ? block_of(t) : nullptr;
  return block && block->guess && is_known(t);
}

void mark_guessed(const Tensor& t) {
  if (!t.defined() || !is_device(t)) return;
  if (Block* block = block_of(t)) mark_guess(*block);
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
  block->guess = false;
  return true;
}

void adopt_shadow(const Tensor& t, const Tensor& values) {
  Block* block = block_of(t);
  if (block && small_enough(t.numel(), t.scalar_type()) && t.strides() == values.strides() && values.storage_offset() == 0)
    block->shadow = values.storage();
}

}  // namespace tonnage
