// A stand-in for libcufft.so: plans know the size of their work area, which Python answers; nothing is transformed.
#include "core.h"

#include <stdio.h>

#define PLANS 65536

enum { SUCCESS = 0, INVALID_PLAN = 1, INVALID_VALUE = 4, NOT_SUPPORTED = 16 };
enum { HALF = 2, FLOAT = 0, DOUBLE = 1, COMPLEX_HALF = 6, COMPLEX_FLOAT = 4, COMPLEX_DOUBLE = 5 };  // cudaDataType

static int64_t work_bytes[PLANS];
static int last_plan;

static int item_bytes(int type) {
  switch (type) {
    case HALF: return 2;
    case FLOAT: case COMPLEX_HALF: return 4;
    case DOUBLE: case COMPLEX_FLOAT: return 8;
    case COMPLEX_DOUBLE: return 16;
    default: return 0;
  }
}

static int is_complex(int type) { return type >= COMPLEX_FLOAT; }

// Handles are numbers from 1 on; the table of sizes starts over after 65535, by when PyTorch's cache has dropped the old ones.
TN_EXPORT int cufftCreate(int *plan) {
  tn_use("cufft");
  *plan = 1 + __atomic_fetch_add(&last_plan, 1, __ATOMIC_ACQ_REL) % (PLANS - 1);
  work_bytes[*plan] = 0;
  return SUCCESS;
}

TN_EXPORT int cufftXtMakePlanMany(int plan, int rank, long long *sizes, long long *input_embed, long long input_stride,
                                  long long input_distance, int input_type, long long *output_embed, long long output_stride,
                                  long long output_distance, int output_type, long long batch, size_t *bytes,
                                  int execution_type) {
  if (plan < 1 || plan >= PLANS) return INVALID_PLAN;
  if (rank < 1 || rank > 3 || !item_bytes(input_type) || !item_bytes(output_type)) return INVALID_VALUE;
  char question[256];
  int used = snprintf(question, sizeof question, "fourier batch=%lld input_bytes=%d output_bytes=%d real=%d signal=", batch,
                      item_bytes(input_type), item_bytes(output_type), !is_complex(input_type) || !is_complex(output_type));
  for (int i = 0; i < rank; i++)
    used += snprintf(question + used, sizeof question - (size_t)used, i ? ",%lld" : "%lld", sizes[i]);
  long long answer = tn_ask(question);
  if (answer < 0) return NOT_SUPPORTED;
  work_bytes[plan] = answer;
  *bytes = (size_t)answer;
  return SUCCESS;
}

TN_EXPORT int cufftGetSize(int plan, size_t *bytes) {
  if (plan < 1 || plan >= PLANS) return INVALID_PLAN;
  *bytes = (size_t)work_bytes[plan];
  return SUCCESS;
}

// The caller allocates work areas: PyTorch always says so. A library that wants cuFFT to allocate them is refused.
TN_EXPORT int cufftSetAutoAllocation(int plan, int allocate) {
  if (plan < 1 || plan >= PLANS) return INVALID_PLAN;
  if (allocate) tn_unknown("cufft", "cufftSetAutoAllocation(plan, 1)");
  return allocate ? NOT_SUPPORTED : SUCCESS;
}
