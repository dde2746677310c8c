// What is assumed of values that nobody computed: the law that the elements of a tensor follow, by its number. The laws
// themselves, and how they follow from each other, are written in Python (../assumptions.py).
#include "kernels.h"

#include <ATen/ops/count_nonzero.h>

namespace tonnage {
namespace {

PyObject* nothing() { Py_RETURN_NONE; }

// The tensor without repeats of what an expanded dimension shows again and again.
Tensor once(Tensor t) {
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.stride(i) == 0 && t.size(i) > 1) t = t.narrow(i, 0, 1);
  return t;
}

// A law as an int, a number as a float, a known tensor as the tuple of its mean; anything else is None.
PyObject* describe(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return nothing();
  if (const int32_t law = law_of(t)) return PyLong_FromLong(law);
  const bool known = is_device(t) ? is_known(t) && block_of(t) : t.device().is_cpu() && t.has_storage();
  if (!known || at::isComplexType(t.scalar_type())) return nothing();
  BelowAutograd below;
  Unrecorded unrecorded;
  Tensor values = once(is_device(t) ? shadow_of(t) : t);
  if (values.numel() > kKnownFloats) return nothing();
  values = values.to(at::kDouble);
  if (values.min().equal(values.max())) return PyFloat_FromDouble(values.min().item<double>());
  return Py_BuildValue("(d)", values.mean().item<double>());
}

PyObject* describe(const IValue& value) {
  if (value.isTensor()) return describe(value.toTensor());
  if (value.isBool()) return PyFloat_FromDouble(value.toBool());
  if (value.isInt()) return PyFloat_FromDouble(static_cast<double>(value.toInt()));
  if (value.isDouble()) return PyFloat_FromDouble(value.toDouble());
  return nothing();
}

struct Answer {
  long law = 0;
  std::optional<double> value;
};

Answer ask(const char* name, PyObject* operands, int64_t numel, const Tensor& result) {
  PyObject* got = PyObject_CallFunction(listeners.laws, "sOLLs", name, operands, (long long)numel, (long long)result.numel(),
                                        c10::toString(result.scalar_type()));
  Answer answer;
  PyObject* value = nullptr;
  if (!got || !PyArg_ParseTuple(got, "lO", &answer.law, &value)) tell_unraisable(listeners.laws);
  else if (value != Py_None) answer.value = PyFloat_AsDouble(value);
  Py_XDECREF(got);
  return answer;
}

}  // namespace

int32_t law_of(const Tensor& t) {
  const Block* block = is_device(t) ? block_of(t) : nullptr;
  return block ? block->law : 0;
}

bool involves_law(const Traits& traits, const Stack& arguments) {
  if (traits.overwrites) return true;
  for (const auto& value : arguments)
    if (value.isTensor() && law_of(value.toTensor())) return true;
  return false;
}

LawQuestion::LawQuestion(const Traits& traits, const Stack& arguments) {
  PyGILState_STATE state = PyGILState_Ensure();
  operands_ = PyTuple_New(static_cast<Py_ssize_t>(arguments.size()));
  for (size_t i = 0; i < arguments.size(); ++i)
    PyTuple_SET_ITEM(operands_, static_cast<Py_ssize_t>(i), traits.overwrites && i == 0 ? nothing() : describe(arguments[i]));
  for (const auto& value : arguments)
    if (!numel_ && value.isTensor() && value.toTensor().defined()) numel_ = value.toTensor().numel();
  PyGILState_Release(state);
}

LawQuestion::~LawQuestion() {
  PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(operands_);
  PyGILState_Release(state);
}

void LawQuestion::tell(const c10::OperatorHandle& op, const Tensor& result) {
  Block* block = is_device(result) ? block_of(result) : nullptr;
  if (!block || !covers_storage(result) || is_known(result)) return;
  PyGILState_STATE state = PyGILState_Ensure();
  const Answer answer = ask(op.schema().name().c_str(), operands_, numel_, result);
  PyGILState_Release(state);
  if (answer.law) block->law = static_cast<int32_t>(answer.law);
  if (!answer.value || !prepare_shadow(result)) return;
  BelowAutograd below;
  shadow_of(result).fill_(*answer.value);
}

// A tensor that was copied, perhaps into another type.
void copy_law(const Tensor& to, int32_t law) {
  Block* block = block_of(to);
  if (!block) return;
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject* operands = Py_BuildValue("(i)", law);
  block->law = static_cast<int32_t>(ask("aten::copy_", operands, to.numel(), to).law);
  Py_DECREF(operands);
  PyGILState_Release(state);
}

// A mask that is known but too large to be kept: the share of its true elements is, and it is exact.
void assume_share(const Tensor& to, const Tensor& mask) {
  Block* block = block_of(to);
  if (!block) return;
  BelowAutograd below;
  const Tensor counted = once(mask);
  const double share = at::count_nonzero(counted).item<double>() / static_cast<double>(counted.numel());
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject* operands = Py_BuildValue("(d)", share);
  block->law = static_cast<int32_t>(ask("tonnage::share", operands, to.numel(), to).law);
  Py_DECREF(operands);
  PyGILState_Release(state);
}

}  // namespace tonnage
