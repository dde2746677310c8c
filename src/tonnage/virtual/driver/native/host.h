// Host memory that CUDA knows of: pinned, registered and managed.
#pragma once
#include "core.h"

enum { TN_PINNED = 1, TN_REGISTERED = 2, TN_MANAGED = 3 };
void *tn_host_alloc(size_t size, int kind);
int tn_host_free(void *pointer);
void tn_host_register(void *pointer, size_t size);
void tn_host_unregister(void *pointer);
int tn_host_kind(const void *pointer);  // 0: CUDA does not know it
