// What the parts of the stand-in for cuDNN share: statuses, descriptors of tensors, and questions to Python.
#pragma once
#include "core.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIMENSIONS 8

enum { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, NOT_SUPPORTED_GRAPH = 3001, NO_HOST_MEMORY = 4003 };

typedef struct { void *stream; } Handle;
typedef struct { int type, dims; int64_t sizes[DIMENSIONS], strides[DIMENSIONS]; } Tensor;
typedef struct { int type, format, dims; int64_t sizes[DIMENSIONS]; } Filter;
typedef struct { float probability; } Dropout;

// Questions: "kind key=value key=value", with commas between the items of a list.

typedef struct { char text[1024]; size_t used; } Question;

static inline void add(Question *question, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int more = vsnprintf(question->text + question->used, sizeof question->text - question->used, format, arguments);
  va_end(arguments);
  question->used += more > 0 ? (size_t)more : 0;
  if (question->used >= sizeof question->text) question->used = sizeof question->text - 1;
}

static inline void add_list(Question *question, const char *key, const int64_t *values, int64_t count) {
  add(question, " %s=", key);
  for (int64_t i = 0; i < count; i++) add(question, i ? ",%lld" : "%lld", (long long)values[i]);
}

static inline const char *type_name(int type) {
  static const char *const names[] = {"float32", "float64", "float16", "int8", "int32", 0, "uint8", 0, 0, "bfloat16", "int64", "bool",
                                      "float8_e4m3fn", "float8_e5m2"};
  int known = type >= 0 && type < (int)(sizeof names / sizeof *names) && names[type];
  return known ? names[type] : "other";
}

static inline int64_t item_bytes(int type) {
  static const char sizes[] = {4, 8, 2, 1, 4, 4, 1, 4, 32, 2, 8, 1, 1, 1};
  return type >= 0 && type < (int)sizeof sizes ? sizes[type] : 4;
}

static inline int answer(const Question *question, size_t *bytes) {
  long long size = tn_ask(question->text);
  if (size < 0) return NOT_SUPPORTED;
  *bytes = (size_t)size;
  return SUCCESS;
}
