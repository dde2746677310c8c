// Puts everything where PyTorch's dispatcher finds it: kernels, autocast's casts, and CUDA's choices in function tables.
#include "kernels.h"

#include <ATen/autocast_mode.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/RNN.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <mutex>

namespace tonnage {
namespace {

constexpr auto kPlain = c10::DispatchKey::PrivateUse3;   // where Python kernels find `compute`

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
#define LOWERED(...) autocast.impl(NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&autocast_lower>());
#define FLOAT(...) autocast.impl(NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&autocast_float>());
  AT_FORALL_LOWER_PRECISION_FP(LOWERED)
  AT_FORALL_FP32(FLOAT)
}

// ---- CUDA's choices that live in dispatch stubs: each is one operator of this project's, written in Python --------------------------

template <class Result, class... Arguments>
Result call(const char* name, const Arguments&... arguments) {
  static std::unordered_map<std::string, c10::OperatorHandle> found;
  static std::mutex lock;
  c10::OperatorHandle* handle;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto it = found.find(name);
    if (it == found.end()) it = found.emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
    handle = &it->second;
  }
  return handle->typed<Result(Arguments...)>().call(arguments...);
}

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool causal, std::optional<double> scale, bool grouped) {
  return call<int64_t>("tonnage::choose_attention", query, key, value, mask, dropout, causal, scale, grouped);
}

std::tuple<Tensor, Tensor> convolution_backward(
    const Tensor& input, const Tensor& grad, const Tensor& weight, at::IntArrayRef padding, at::IntArrayRef stride,
    at::IntArrayRef dilation, int64_t groups, bool benchmark, bool deterministic, bool tf32, std::array<bool, 2> mask) {
  return call<std::tuple<Tensor, Tensor>>(
      "tonnage::cudnn_convolution_backward", input, grad, weight, padding, stride, dilation, groups, benchmark, deterministic,
      tf32, mask[0], mask[1]);
}

std::tuple<Tensor, Tensor> convolution_transpose_backward(
    const Tensor& input, const Tensor& grad, const Tensor& weight, at::IntArrayRef padding, at::IntArrayRef output_padding,
    at::IntArrayRef stride, at::IntArrayRef dilation, int64_t groups, bool benchmark, bool deterministic, bool tf32,
    std::array<bool, 2> mask) {
  return call<std::tuple<Tensor, Tensor>>(
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
  return call<Rnn>(
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

}  // namespace

extern "C" {

void tonnage_listen(PyObject* unknown, PyObject* unmodelled, PyObject* library, PyObject* laws) {
  for (PyObject* callback : {unknown, unmodelled, library, laws}) Py_INCREF(callback);
  listeners.unknown = unknown;
  listeners.unmodelled = unmodelled;
  listeners.library = library;
  listeners.laws = laws;
}

// To be called before torch is imported, or while its rules in Python are lifted off; see native_shape_rules.
void tonnage_keep_shape_rules() { keep_shape_rules(); }

// `computed`: operators (one a line) that run through `compute` on the CUDA key; `plain`: all that CUDA implements, which
// a Python kernel may ask for by redispatching to kPlain.
void tonnage_register(const char* computed, const char* plain) {
  auto& device = library(c10::DispatchKey::CUDA);
  register_tensors(device);
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

// Operators on sparse and on nested tensors that PyTorch writes alike for host and device.
void tonnage_register_layouts(const char* sparse_names, const char* nested_names) {
  auto& sparse = library(c10::DispatchKey::SparseCUDA);
  each_line(sparse_names, [&](const std::string& name) { register_sparse(sparse, name); });
  register_sparse_products(sparse);
  auto& nested = library(c10::DispatchKey::NestedTensorCUDA);
  each_line(nested_names, [&](const std::string& name) { register_nested(nested, name); });
}

void tonnage_register_fallback() {
  library(c10::DispatchKey::CUDA, "_").fallback(torch::CppFunction::makeFromBoxedFunction<&compute_foreign>());
}

void tonnage_register_host(const char* fills, const char* derives) {
  static Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& host = library(c10::DispatchKey::CPU);
  each_line(fills, [&](const std::string& name) { register_host_fill(host, name); });
  each_line(derives, [&](const std::string& name) { register_host_derive(host, name); });
  register_host_copy(host);
}

// "name library" a line.
void tonnage_set_libraries(const char* pairs) {
  each_line(pairs, [&](const std::string& line) {
    const auto space = line.find(' ');
    name_library(line.substr(0, space), line.substr(space + 1));
  });
}

}  // extern "C"
}  // namespace tonnage
