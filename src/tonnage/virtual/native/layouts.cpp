// Sparse and nested tensors on the device: what PyTorch writes alike for host and device runs as it is, over the dense
// operators of the device. What CUDA has kernels of its own for is written in Python (../kernels/sparse.py).
#include "kernels.h"

#include <ATen/SparseTensorImpl.h>

// PyTorch's own, of every build; no header of the wheel declares them.
namespace at::native {
TORCH_API Tensor& _mul_dense_sparse_out(const Tensor& dense, const Tensor& sparse, Tensor& out);
TORCH_API Tensor& _mul_sparse_sparse_zero_dim_out(const Tensor& zero_dim, const Tensor& other, Tensor& out);
}  // namespace at::native

namespace tonnage {
namespace {

using HostCode = std::unordered_map<std::string, c10::SafeKernelFunction>;

template <c10::DispatchKey host>
HostCode& host_code() {
  static auto* kernels = new HostCode;
  return *kernels;
}

template <c10::DispatchKey host>
void run_host_code(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  host_code<host>().at(c10::toString(op.operator_name())).callBoxed(op, keys, stack);
}

template <c10::DispatchKey host>
void share(torch::Library& aten, const std::string& name) {
  const auto dot = name.find('.');
  const std::string base = "aten::" + name.substr(0, dot);
  auto op = c10::Dispatcher::singleton().findSchema({base, dot == std::string::npos ? "" : name.substr(dot + 1)});
  if (!op || !op->hasKernelForDispatchKey(host)) return;
  host_code<host>().emplace(c10::toString(op->operator_name()), op->getComputedKernelForDispatchKey(host));
  aten.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_host_code<host>>());
}

Tensor& mul_out(const Tensor& self, const Tensor& other, Tensor& out) {
  if (!other.is_sparse()) return at::native::_mul_dense_sparse_out(other, self, out);
  if (!self.is_sparse()) return at::native::_mul_dense_sparse_out(self, other, out);
  if (self.dim() == 0) return at::native::_mul_sparse_sparse_zero_dim_out(self, other, out);
  if (other.dim() == 0) return at::native::_mul_sparse_sparse_zero_dim_out(other, self, out);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "The virtual GPU cannot multiply two sparse tensors: where both have elements depends on data. "
             "For a virtual run make one of them dense (`to_dense()`).");
}

}  // namespace

void register_sparse(torch::Library& aten, const std::string& name) { share<c10::DispatchKey::SparseCPU>(aten, name); }
void register_nested(torch::Library& aten, const std::string& name) { share<c10::DispatchKey::NestedTensorCPU>(aten, name); }
void register_sparse_products(torch::Library& aten) { aten.impl("mul.out", TORCH_FN(mul_out)); }

// What the sum of two sparse tensors does with its result; Python has no way to it that does not copy.
TORCH_LIBRARY_FRAGMENT(tonnage, library) {
  library.def("alias_into_sparse(Tensor(a!) self, Tensor indices, Tensor values) -> ()",
              [](const Tensor& self, const Tensor& indices, const Tensor& values) {
                auto* impl = static_cast<at::SparseTensorImpl*>(self.unsafeGetTensorImpl());
                impl->set_indices_and_values_unsafe(indices, values);
              });
}

}  // namespace tonnage
