// Machine code. A library registers its kernels with a fat binary, which has their code for several architectures; what each
// kernel takes is written there.
#pragma once
#include "kernels.h"

typedef struct { uint64_t name; uint32_t symbol; TnKernel needs; } Known;  // a kernel by the hash of its name
typedef struct { const void *binary; Known *kernels; int count, ptx_version; } Code;

Code tn_read_code(const void *binary);  // a wrapper that was registered, or a module that was loaded by hand: fat or one cubin
TnKernel *tn_known_kernel(const Code *code, const char *name);  // NULL: it is not there
