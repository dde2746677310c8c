// cuDNN's graph API: descriptors that hold attributes, and what follows from them. An operation graph is recognised as a
// convolution or as attention; the heuristic offers engines for it, and the plan of an engine has the workspace that Python
// answers. Any other graph is refused by name. Descriptors are shared, not copied: the caller may drop a graph before its plan.
#include "cudnn.h"

enum {  // cudnnBackendDescriptorType_t
  ENGINE = 2, ENGINE_CONFIG = 3, HEURISTIC = 4, PLAN = 5, CONVOLVE = 10, CONVOLVE_TO_WEIGHT = 11, CONVOLVE_TO_INPUT = 12,
  GRAPH = 15, MATMUL = 19, REDUCTION = 22, ATTENTION = 41,
};

enum {  // cudnnBackendAttributeName_t
  CONV_COMPUTE_TYPE = 100, CONV_DILATIONS = 102, CONV_STRIDES = 103, CONV_PADDINGS = 105,
  HEURISTIC_MODE = 200, HEURISTIC_GRAPH = 201, HEURISTIC_RESULTS = 202,
  CONFIG_ENGINE = 300, CONFIG_INTERMEDIATES = 301, CONFIG_KNOBS = 302, CONFIG_WORKSPACE = 303,
  CONFIG_SHARED_MEMORY = 304,
  PLAN_CONFIG = 401, PLAN_WORKSPACE = 402,
  GRAPH_OPERATIONS = 801,
  TENSOR_TYPE = 901, TENSOR_SIZES = 902, TENSOR_STRIDES = 903, TENSOR_ID = 906, TENSOR_IS_VIRTUAL = 907,
  ENGINE_GRAPH = 1300, ENGINE_INDEX = 1301, ENGINE_KNOBS = 1302, ENGINE_NUMERICAL_NOTES = 1303, ENGINE_LAYOUTS = 1304,
  ENGINE_BEHAVIOUR_NOTES = 1305,
  MATMUL_A = 1520, MATMUL_B = 1521, MATMUL_C = 1522, REDUCTION_X = 1610,
  ATTENTION_Q = 2800, ATTENTION_V = 2802,
  FOUND_ENGINES = -1, FOUND_WORKSPACES = -2,  // our own, of a heuristic
};

enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15 };
enum { MODE_FALLBACK = 2 };
enum { PLAIN_ENGINE = 0, MOST_ENGINES = 16 };  // engine 0 multiplies matrices without unfolding them: it needs no workspace

typedef struct Attribute {
  int name, type;
  int64_t count;
  void *values;
  struct Attribute *next;
} Attribute;

typedef struct {
  int type, references;
  int64_t workspace_bytes;  // of an engine
  Attribute *attributes;
} Descriptor;

static size_t value_bytes(int type) {
  static const unsigned char sizes[] = {8, 4, 1, 8, 4, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 8, 4, 4, 4, 4, 4, 4, 4, 4, 1, 4, 16};
  return type >= 0 && type < (int)sizeof sizes ? sizes[type] : 4;  // later ones are enumerations
}

static const Attribute *attribute(const Descriptor *descriptor, int name) {
  const Attribute *each = descriptor ? descriptor->attributes : NULL;
  while (each && each->name != name) each = each->next;
  return each;
}

static Descriptor *held(const Descriptor *descriptor, int name) {
  const Attribute *found = attribute(descriptor, name);
  return found && found->type == TYPE_DESCRIPTOR && found->count ? ((Descriptor **)found->values)[0] : NULL;
}

static int64_t number(const Descriptor *descriptor, int name) {
  const Attribute *found = attribute(descriptor, name);
  if (!found || !found->count) return 0;
  size_t size = value_bytes(found->type);
  return size == 8 ? *(int64_t *)found->values : size == 4 ? *(int32_t *)found->values : *(int8_t *)found->values;
}

static void drop(Descriptor *descriptor);

static void clear(Descriptor *descriptor) {
  for (Attribute *each = descriptor->attributes, *next; each; each = next) {
    next = each->next;
    for (int64_t i = 0; each->type == TYPE_DESCRIPTOR && i < each->count; i++) drop(((Descriptor **)each->values)[i]);
    free(each->values);
    free(each);
  }
  descriptor->attributes = NULL;
}

static void drop(Descriptor *descriptor) {
  if (!descriptor || __atomic_sub_fetch(&descriptor->references, 1, __ATOMIC_ACQ_REL) > 0) return;
  clear(descriptor);
  free(descriptor);
}

static int keep(Descriptor *descriptor, int name, int type, int64_t count, const void *values) {
  Attribute *found = (Attribute *)attribute(descriptor, name);
  size_t size = value_bytes(type) * (size_t)count;
  void *copy = malloc(size + 1);
  if (!found) {
    found = calloc(1, sizeof *found);
    if (!found || !copy) return free(found), free(copy), NO_HOST_MEMORY;
    found->name = name;
    found->next = descriptor->attributes;
    descriptor->attributes = found;
  }
  if (!copy) return NO_HOST_MEMORY;
  if (size) memcpy(copy, values, size);
  for (int64_t i = 0; type == TYPE_DESCRIPTOR && i < count; i++) {
    Descriptor *each = ((Descriptor **)copy)[i];
    if (each) __atomic_add_fetch(&each->references, 1, __ATOMIC_ACQ_REL);
  }
  for (int64_t i = 0; found->type == TYPE_DESCRIPTOR && i < found->count; i++) drop(((Descriptor **)found->values)[i]);
  free(found->values);
  found->type = type, found->count = count, found->values = copy;
  return SUCCESS;
}

static int become(Descriptor *target, const Descriptor *source) {
  clear(target);
  target->workspace_bytes = source->workspace_bytes;
  for (const Attribute *each = source->attributes; each; each = each->next) {
    int status = keep(target, each->name, each->type, each->count, each->values);
    if (status) return status;
  }
  return SUCCESS;
}

// What a graph is, as a question.

static void add_tensor(Question *question, const char *key, const Descriptor *tensor) {
  const Attribute *sizes = attribute(tensor, TENSOR_SIZES), *strides = attribute(tensor, TENSOR_STRIDES);
  char strides_key[16];
  snprintf(strides_key, sizeof strides_key, "%ss", key);
  if (sizes) add_list(question, key, sizes->values, sizes->count);
  if (strides) add_list(question, strides_key, strides->values, strides->count);
}

static void ask_about_convolution(Question *question, const Descriptor *operation) {
  static const struct { const char *way; int how, w, x, y; } ways[] = {
      {"forward", 702, 703, 704, 705}, {"backward_filter", 714, 715, 716, 717}, {"backward_data", 708, 709, 710, 711}};
  int place = operation->type - CONVOLVE;
  const Descriptor *how = held(operation, ways[place].how), *x = held(operation, ways[place].x);
  add(question, "convolution way=%s dtype=%s compute=%s", ways[place].way, type_name((int)number(x, TENSOR_TYPE)),
      type_name((int)number(how, CONV_COMPUTE_TYPE)));
  add_tensor(question, "x", x);
  add_tensor(question, "w", held(operation, ways[place].w));
  add_tensor(question, "y", held(operation, ways[place].y));
  static const struct { const char *key; int name; } lists[] = {
      {"padding", CONV_PADDINGS}, {"stride", CONV_STRIDES}, {"dilation", CONV_DILATIONS}};
  for (int i = 0; i < 3; i++) {
    const Attribute *list = attribute(how, lists[i].name);
    if (list) add_list(question, lists[i].key, list->values, list->count);
  }
}

// Bytes of products that are summed over heads (where heads share keys and values) and that only the plan itself can hold.
static int64_t summed_bytes(const Attribute *operations, const Descriptor *product) {
  const Descriptor *made = held(product, MATMUL_C);
  const Attribute *sizes = attribute(made, TENSOR_SIZES);
  int64_t bytes = item_bytes((int)number(made, TENSOR_TYPE));
  for (int64_t i = 0; sizes && i < sizes->count; i++) bytes *= ((int64_t *)sizes->values)[i];
  for (int64_t i = 0; i < operations->count; i++) {
    const Descriptor *each = ((Descriptor **)operations->values)[i];
    int is_summed = each->type == REDUCTION && number(held(each, REDUCTION_X), TENSOR_ID) == number(made, TENSOR_ID);
    if (is_summed && number(made, TENSOR_IS_VIRTUAL)) return bytes;
  }
  return 0;
}

// Two products make attention: of the queries and the transposed keys, then with the values. Its gradient takes four or five.
static int ask_about_attention(Question *question, const Attribute *operations, const Descriptor *const *products, int count) {
  const Descriptor *q = held(products[0], MATMUL_A), *keys = held(products[0], MATMUL_B);
  if (count == 3 || count > 5 || number(q, TENSOR_IS_VIRTUAL) || number(keys, TENSOR_IS_VIRTUAL)) return 0;
  add(question, "attention pass=%s dtype=%s", count == 2 ? "forward" : "backward", type_name((int)number(q, TENSOR_TYPE)));
  add_tensor(question, "q", q);
  if (count == 2) return add_tensor(question, "v", held(products[1], MATMUL_B)), 1;
  int64_t summed = 0;
  for (int i = 0; i < count; i++) summed += summed_bytes(operations, products[i]);
  add(question, " summed_bytes=%lld", (long long)summed);
  return 1;
}

static int recognise(const Descriptor *graph, Question *question) {
  const Attribute *operations = attribute(graph, GRAPH_OPERATIONS);
  const Descriptor *products[8];
  int count = 0;
  memset(question, 0, sizeof *question);
  for (int64_t i = 0; operations && i < operations->count; i++) {
    const Descriptor *each = ((Descriptor **)operations->values)[i];
    if (each->type >= CONVOLVE && each->type <= CONVOLVE_TO_INPUT) return ask_about_convolution(question, each), 1;
    if (each->type == ATTENTION) {
      add(question, "attention pass=forward dtype=%s", type_name((int)number(held(each, ATTENTION_Q), TENSOR_TYPE)));
      add_tensor(question, "q", held(each, ATTENTION_Q));
      add_tensor(question, "v", held(each, ATTENTION_V));
      return 1;
    }
    if (each->type == MATMUL && count < 8) products[count++] = each;
  }
  return count >= 2 && ask_about_attention(question, operations, products, count);
}

static int refuse(const Descriptor *graph) {
  const Attribute *operations = attribute(graph, GRAPH_OPERATIONS);
  Question name = {0};
  add(&name, "cudnnBackendFinalize of a graph of the operations");
  for (int64_t i = 0; operations && i < operations->count; i++) add(&name, " %d", ((Descriptor **)operations->values)[i]->type);
  tn_unknown("cudnn", name.text);
  return NOT_SUPPORTED_GRAPH;
}

// Engines. The first one is what the heuristic would choose; the others are tried while searching, or when memory is short.

static int64_t engine_bytes(const Descriptor *graph, int64_t index) {
  Question question;
  if (!recognise(graph, &question)) return -1;
  int is_convolution = !strncmp(question.text, "convolution", 11);
  if (index == PLAIN_ENGINE) return is_convolution ? 0 : -1;
  add(&question, " engine=%lld", (long long)(index - 1));
  return tn_ask(question.text);
}

// Find the engines when the heuristic is finalised, and keep their numbers and workspaces for its results.
static int find_engines(Descriptor *heuristic) {
  const Descriptor *graph = held(heuristic, HEURISTIC_GRAPH);
  int is_fallback = number(heuristic, HEURISTIC_MODE) == MODE_FALLBACK;
  int64_t first = is_fallback ? PLAIN_ENGINE : 1, last = is_fallback ? PLAIN_ENGINE : MOST_ENGINES;
  int64_t indices[MOST_ENGINES + 1], bytes[MOST_ENGINES + 1], count = 0;
  for (int64_t i = first; i <= last && (bytes[count] = engine_bytes(graph, i)) >= 0; i++) indices[count++] = i;
  int status = keep(heuristic, FOUND_ENGINES, TYPE_INT64, count, indices);
  return status ? status : keep(heuristic, FOUND_WORKSPACES, TYPE_INT64, count, bytes);
}

static Descriptor *new_descriptor(int type) {
  Descriptor *made = calloc(1, sizeof *made);
  if (made) made->type = type, made->references = 1;
  return made;
}

static int offer(const Descriptor *heuristic, int64_t wanted, int64_t *offered, Descriptor **configs) {
  const Attribute *found = attribute(heuristic, FOUND_ENGINES), *workspaces = attribute(heuristic, FOUND_WORKSPACES);
  if (!found || !workspaces) return BAD_PARAM;  // not finalised
  const int64_t *indices = found->values, *bytes = workspaces->values, count = found->count;
  Descriptor *graph = held(heuristic, HEURISTIC_GRAPH);
  for (int64_t i = 0; configs && i < count && i < wanted; i++) {
    Descriptor *engine = new_descriptor(ENGINE);
    if (!engine) return NO_HOST_MEMORY;
    engine->workspace_bytes = bytes[i];
    int status = keep(engine, ENGINE_GRAPH, TYPE_DESCRIPTOR, 1, &graph);
    if (!status) status = keep(engine, ENGINE_INDEX, TYPE_INT64, 1, &indices[i]);
    if (!status) status = keep(configs[i], CONFIG_ENGINE, TYPE_DESCRIPTOR, 1, &engine);
    drop(engine);
    if (status) return status;
  }
  if (offered) *offered = configs && wanted < count ? wanted : count;
  return SUCCESS;
}

// The API.

TN_EXPORT int cudnnBackendCreateDescriptor(int type, Descriptor **descriptor) {
  return (*descriptor = new_descriptor(type)) ? SUCCESS : NO_HOST_MEMORY;
}

TN_EXPORT int cudnnBackendDestroyDescriptor(Descriptor *descriptor) { drop(descriptor); return SUCCESS; }

TN_EXPORT int cudnnBackendSetAttribute(Descriptor *descriptor, int name, int type, int64_t count, const void *values) {
  return descriptor && count >= 0 && (values || !count) ? keep(descriptor, name, type, count, values) : BAD_PARAM;
}

TN_EXPORT int cudnnBackendFinalize(Descriptor *descriptor) {
  Question question;
  if (descriptor->type == GRAPH && !recognise(descriptor, &question)) return refuse(descriptor);
  if (descriptor->type == HEURISTIC) return find_engines(descriptor);
  if (descriptor->type == ENGINE) {
    descriptor->workspace_bytes = engine_bytes(held(descriptor, ENGINE_GRAPH), number(descriptor, ENGINE_INDEX));
    return descriptor->workspace_bytes < 0 ? NOT_SUPPORTED : SUCCESS;
  }
  if (descriptor->type == PLAN) return held(held(descriptor, PLAN_CONFIG), CONFIG_ENGINE) ? SUCCESS : NOT_SUPPORTED;
  return SUCCESS;
}

static int give(int64_t value, int64_t wanted, int64_t *count, void *values) {
  if (count) *count = 1;
  if (values && wanted > 0) *(int64_t *)values = value;
  return SUCCESS;
}

static int unknown_attribute(int name) {
  char text[64];
  snprintf(text, sizeof text, "cudnnBackendGetAttribute of attribute %d", name);
  tn_unknown("cudnn", text);
  return NOT_SUPPORTED;
}

TN_EXPORT int cudnnBackendGetAttribute(const Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *count,
                                       void *values) {
  switch (name) {  // what follows from others
    case CONFIG_SHARED_MEMORY:  // 32 bits wide; no engine here uses any, so no limit leaves one out
      if (count) *count = 1;
      if (values && wanted > 0) *(int32_t *)values = 0;
      return SUCCESS;
    case HEURISTIC_RESULTS: return offer(descriptor, wanted, count, values);
    case CONFIG_WORKSPACE: return give(held(descriptor, CONFIG_ENGINE)->workspace_bytes, wanted, count, values);
    case PLAN_WORKSPACE:
      return give(held(held(descriptor, PLAN_CONFIG), CONFIG_ENGINE)->workspace_bytes, wanted, count, values);
    case ENGINE_KNOBS: case ENGINE_NUMERICAL_NOTES: case ENGINE_LAYOUTS: case ENGINE_BEHAVIOUR_NOTES: case CONFIG_KNOBS:
    case CONFIG_INTERMEDIATES:  // our engines have none
      if (count) *count = 0;
      return SUCCESS;
  }
  const Attribute *found = attribute(descriptor, name);  // what was set
  if (!found || found->type != type) return unknown_attribute(name);
  if (count) *count = found->count;
  int64_t given = values ? wanted < found->count ? wanted : found->count : 0;
  if (type != TYPE_DESCRIPTOR) {
    if (given > 0) memcpy(values, found->values, value_bytes(type) * (size_t)given);
    return SUCCESS;
  }
  for (int64_t i = 0; i < given; i++) {  // into descriptors that the caller has made
    int status = become(((Descriptor **)values)[i], ((Descriptor **)found->values)[i]);
    if (status) return status;
  }
  return SUCCESS;
}

