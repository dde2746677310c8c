// A stand-in for libcudnn.so.9. What cuDNN decides (workspaces, sizes of reserve spaces and weights, its version) is asked of
// Python; what it computes is not done. Here: handles, descriptors, dropout, batch norm, spatial transformers. The graph API
// (convolutions, attention) and the recurrent networks have files of their own.
#include "cudnn.h"

// The library and its handles.

TN_EXPORT size_t cudnnGetVersion(void) { return (size_t)tn_ask("version library=cudnn"); }
TN_EXPORT size_t cudnnGetCudartVersion(void) { return (size_t)tn_ask("version library=cuda"); }

TN_EXPORT int cudnnGetProperty(int property, int *value) {
  int version = (int)cudnnGetVersion();
  int parts[] = {version / 10000, version / 100 % 100, version % 100};
  if (property < 0 || property > 2) return BAD_PARAM;
  *value = parts[property];
  return SUCCESS;
}

TN_EXPORT const char *cudnnGetErrorString(int status) {
  switch (status) {
    case SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
    case NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
    case NOT_SUPPORTED_GRAPH: return "CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN";
    case NO_HOST_MEMORY: return "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED";
    default: return "CUDNN_STATUS_INTERNAL_ERROR";
  }
}

TN_EXPORT void cudnnGetLastErrorString(char *message, size_t size) {
  if (size) snprintf(message, size, "The virtual GPU has no model of this call of cuDNN.");
}

TN_EXPORT int cudnnCreate(Handle **handle) {
  tn_use("cudnn");
  return (*handle = calloc(1, sizeof **handle)) ? SUCCESS : NO_HOST_MEMORY;
}

TN_EXPORT int cudnnSetStream(Handle *handle, void *stream) { handle->stream = stream; return SUCCESS; }
TN_EXPORT int cudnnGetStream(Handle *handle, void **stream) { *stream = handle->stream; return SUCCESS; }

// Descriptors of tensors and filters.

TN_EXPORT int cudnnSetTensorNdDescriptor(Tensor *tensor, int type, int dims, const int *sizes, const int *strides) {
  if (dims < 1 || dims > DIMENSIONS) return NOT_SUPPORTED;
  *tensor = (Tensor){.type = type, .dims = dims};
  for (int i = 0; i < dims; i++) tensor->sizes[i] = sizes[i], tensor->strides[i] = strides[i];
  return SUCCESS;
}

TN_EXPORT int cudnnGetTensorNdDescriptor(const Tensor *tensor, int wanted, int *type, int *dims, int *sizes, int *strides) {
  *type = tensor->type;
  *dims = tensor->dims;
  for (int i = 0; i < wanted && i < tensor->dims; i++) {
    sizes[i] = (int)tensor->sizes[i];
    strides[i] = (int)tensor->strides[i];
  }
  return SUCCESS;
}

TN_EXPORT int cudnnSetFilterNdDescriptor(Filter *filter, int type, int format, int dims, const int *sizes) {
  if (dims < 1 || dims > DIMENSIONS) return NOT_SUPPORTED;
  *filter = (Filter){.type = type, .format = format, .dims = dims};
  for (int i = 0; i < dims; i++) filter->sizes[i] = sizes[i];
  return SUCCESS;
}

TN_EXPORT int cudnnGetFilterNdDescriptor(const Filter *filter, int wanted, int *type, int *format, int *dims, int *sizes) {
  *type = filter->type;
  *format = filter->format;
  *dims = filter->dims;
  for (int i = 0; i < wanted && i < filter->dims; i++) sizes[i] = (int)filter->sizes[i];
  return SUCCESS;
}

// Dropout.

TN_EXPORT int cudnnDropoutGetStatesSize(Handle *handle, size_t *bytes) {
  return answer(&(Question){.text = "dropout_states"}, bytes);
}

TN_EXPORT int cudnnSetDropoutDescriptor(Dropout *dropout, Handle *handle, float probability, void *states, size_t bytes,
                                        unsigned long long seed) {
  dropout->probability = probability;
  tn_log_workspace(states, bytes);
  return SUCCESS;
}

TN_EXPORT int cudnnRestoreDropoutDescriptor(Dropout *dropout, Handle *handle, float probability, void *states, size_t bytes,
                                            unsigned long long seed) {
  return cudnnSetDropoutDescriptor(dropout, handle, probability, states, bytes, seed);
}

// Batch normalisation.

static int batch_norm_bytes(const char *pass, const Tensor *x, int fused_operation, size_t *bytes) {
  if (fused_operation) return NOT_SUPPORTED;  // with an activation; PyTorch never asks for it
  Question question = {0};
  add(&question, "batch_norm pass=%s dtype=%s", pass, type_name(x->type));
  add_list(&question, "x", x->sizes, x->dims);
  add_list(&question, "xs", x->strides, x->dims);
  return answer(&question, bytes);
}

TN_EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    Handle *handle, int mode, int operations, const Tensor *x, const Tensor *z, const Tensor *y, const Tensor *statistics,
    const void *activation, size_t *bytes) {
  return batch_norm_bytes("forward", x, operations, bytes);
}

TN_EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    Handle *handle, int mode, int operations, const Tensor *x, const Tensor *y, const Tensor *dy, const Tensor *dz,
    const Tensor *dx, const Tensor *statistics, const void *activation, size_t *bytes) {
  return batch_norm_bytes("backward", x, operations, bytes);
}

TN_EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(Handle *handle, int mode, int operations,
                                                                   const void *activation, const Tensor *x, size_t *bytes) {
  if (operations) return NOT_SUPPORTED;
  *bytes = 0;  // without a fused activation the backward pass needs only the saved statistics
  return SUCCESS;
}
