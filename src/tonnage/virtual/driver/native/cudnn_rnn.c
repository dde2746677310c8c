// cuDNN's recurrent networks: the sizes come from Python, the places of the weights in their buffer are laid out here. Matrices
// come first (by layer and direction: those of the input, of the state, of the projection), then all biases.
#include "cudnn.h"

#define RNN_TRAINING 1
#define RNN_PACKED 1  // CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_PACKED

typedef struct {
  int mode, directions, type;
  int64_t input, hidden, projected, layers;
  float dropout;
} Network;

typedef struct { int type, layout; int64_t steps, batch, width, rows; } Sequences;

static int gates(const Network *network) {
  return network->mode == 2 ? 4 : network->mode == 3 ? 3 : 1;  // LSTM, GRU, plain
}

static int64_t output_width(const Network *network) { return network->projected ? network->projected : network->hidden; }

static int64_t input_width(const Network *network, int64_t place) {
  return place < network->directions ? network->input : output_width(network) * network->directions;
}

static int64_t matrix_elements(const Network *network, int64_t place) {
  int64_t width = input_width(network, place) + output_width(network);
  return gates(network) * network->hidden * width + network->projected * network->hidden;
}

static Question about(const Network *network, const char *what) {
  Question question = {0};
  add(&question, "recurrent what=%s mode=%d input=%lld hidden=%lld layers=%lld directions=%d projected=%lld dtype=%s", what,
      network->mode, (long long)network->input, (long long)network->hidden, (long long)network->layers, network->directions,
      (long long)network->projected, type_name(network->type));
  return question;
}

TN_EXPORT int cudnnSetRNNDescriptor_v8(Network *network, int algorithm, int mode, int biases, int direction, int input_mode,
                                       int type, int math_type, int math_mode, int32_t input, int32_t hidden,
                                       int32_t projected, int32_t layers, const Dropout *dropout, uint32_t flags) {
  if (mode < 0 || mode > 3) return NOT_SUPPORTED;
  int32_t narrower = projected == hidden ? 0 : projected;  // a projection to the same size is none
  *network = (Network){mode, direction + 1, type, input, hidden, narrower, layers, dropout ? dropout->probability : 0};
  return SUCCESS;
}

TN_EXPORT int cudnnSetRNNDataDescriptor(Sequences *sequences, int type, int layout, int steps, int batch, int width,
                                        const int *lengths, void *padding) {
  *sequences = (Sequences){type, layout, steps, batch, width, 0};
  for (int i = 0; i < batch; i++) sequences->rows += lengths[i];
  return SUCCESS;
}

TN_EXPORT int cudnnGetRNNWeightSpaceSize(Handle *handle, const Network *network, size_t *bytes) {
  Question question = about(network, "weights");
  return answer(&question, bytes);
}

TN_EXPORT int cudnnGetRNNTempSpaceSizes(Handle *handle, const Network *network, int mode, const Sequences *x,
                                        size_t *workspace_bytes, size_t *reserve_bytes) {
  int is_packed = x->layout == RNN_PACKED, training = mode == RNN_TRAINING;
  size_t *sizes[] = {workspace_bytes, reserve_bytes};
  for (int i = 0; i < 2; i++) {
    if (!sizes[i]) continue;
    Question question = about(network, i ? "reserve" : "workspace");
    add(&question, " training=%d dropout=%d steps=%lld batch=%lld rows=%lld", training, training && network->dropout > 0,
        (long long)x->steps, (long long)x->batch, (long long)(is_packed ? x->rows : 0));
    int status = answer(&question, sizes[i]);
    if (status) return status;
  }
  return SUCCESS;
}

static void describe(Tensor *tensor, int type, int64_t rows, int64_t columns) {
  if (tensor) *tensor = (Tensor){type, 3, {1, rows, columns}, {rows * columns, columns, 1}};
}

TN_EXPORT int cudnnGetRNNWeightParams(Handle *handle, const Network *network, int32_t place, size_t bytes, const void *weights,
                                      int32_t linear, Tensor *matrix, void **matrix_address, Tensor *bias,
                                      void **bias_address) {
  int64_t count = gates(network), places = network->layers * network->directions, hidden = network->hidden;
  int64_t input = input_width(network, place), output = output_width(network), item = item_bytes(network->type);
  int is_projection = linear == 2 * count;
  int last = (int)(2 * count) - !network->projected;
  if (place < 0 || place >= places || linear < 0 || linear > last) return BAD_PARAM;

  // The matrix: after those of earlier layers, and after those of this layer with a lower number.
  int64_t matrices = 0, before = 0;
  for (int64_t i = 0; i < places; i++) matrices += matrix_elements(network, i);
  for (int64_t i = 0; i < place; i++) before += matrix_elements(network, i);
  int64_t of_input = linear < count ? linear : count, of_state = linear - of_input;
  before += hidden * (of_input * input + of_state * output);
  describe(matrix, network->type, is_projection ? network->projected : hidden,
           is_projection ? hidden : linear < count ? input : output);
  if (matrix_address) *matrix_address = (char *)weights + before * item;

  // The bias; a projection has none.
  int64_t of_biases = matrices + (place * 2 * count + linear) * hidden;
  if (is_projection && bias) *bias = (Tensor){.type = network->type};
  if (!is_projection) describe(bias, network->type, hidden, 1);
  if (bias_address) *bias_address = is_projection ? NULL : (char *)weights + of_biases * item;
  return SUCCESS;
}

