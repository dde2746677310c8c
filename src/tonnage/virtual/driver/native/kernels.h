// Kernels as host code knows them: their names, what they need, how many fit on a multiprocessor; and the card's attributes.
#pragma once
#include "core.h"

// What a kernel takes; `threads` is the most that a block of it may have.
typedef struct {
  int32_t registers, shared_bytes, local_bytes, constant_bytes, threads, binary_version, ptx_version;
} TnKernel;

void **tn_register_binary(void *binary);
void tn_register_kernel(void **binary, const void *host, const char *name);
void tn_register_variable(const void *host, size_t size);
void *tn_variable(const void *host);
TnKernel tn_kernel(const void *host);
TnKernel tn_kernel_of(const void *binary, const char *name, int is_registered);
int tn_occupancy(TnKernel kernel, int threads, int64_t dynamic_shared);
int tn_device_attribute(int attribute, int device);
int tn_entry_point(const char *name, void **function, int *status);  // `status` may be NULL
const char *tn_error_name(int error);
const char *tn_error_text(int error);
