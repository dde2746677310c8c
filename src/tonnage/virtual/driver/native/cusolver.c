// A stand-in for libcusolver.so: the sizes of work areas come from Python, every factorisation succeeds, nothing is computed.
//
// A routine has a variant for each type: S and D (real), C and Z (complex, where "sy" and "or" become "he" and "un"). Types of
// pointers do not matter here, so they are all `void *`.
#include "core.h"

#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, ALLOC_FAILED = 2, INVALID_VALUE = 3, NOT_SUPPORTED = 9 };

static int item_bytes(int type) {  // cudaDataType
  return type == 0 ? 4 : type == 1 || type == 4 ? 8 : type == 5 ? 16 : 0;
}

static int ask(const char *routine, int64_t rows, int64_t columns, int64_t reflectors, int64_t batch, int item, size_t *bytes) {
  char question[256];
  if (!item) return INVALID_VALUE;
  snprintf(question, sizeof question, "solver routine=%s rows=%lld columns=%lld reflectors=%lld batch=%lld item_bytes=%d",
           routine, (long long)rows, (long long)columns, (long long)reflectors, (long long)batch, item);
  long long answer = tn_ask(question);
  if (answer < 0) return NOT_SUPPORTED;
  *bytes = (size_t)answer;
  return SUCCESS;
}

// The older routines count elements, not bytes.
static int ask_elements(const char *routine, int64_t rows, int64_t columns, int64_t reflectors, int64_t batch, int item,
                        int *elements) {
  size_t bytes = 0;
  int status = ask(routine, rows, columns, reflectors, batch, item, &bytes);
  if (!status) *elements = (int)((bytes + (size_t)item - 1) / (size_t)item);
  return status;
}

// PyTorch reads `info` back: zero is success.
static int succeed(const char *name, void *info, int64_t count) {
  tn_launch(name);
  if (info) tn_fill(info, 0, sizeof(int) * (size_t)count);
  return SUCCESS;
}

// Handles and descriptors: they hold nothing.

static int make_empty(void **made) { return (*made = malloc(1)) ? SUCCESS : ALLOC_FAILED; }

TN_EXPORT int cusolverDnCreate(void **handle) {
  tn_use("cusolver");
  return make_empty(handle);
}

TN_EXPORT int cusolverDnDestroy(void *handle) { free(handle); return SUCCESS; }
TN_EXPORT int cusolverDnSetStream(void *handle, void *stream) { (void)handle, (void)stream; return SUCCESS; }
TN_EXPORT int cusolverDnCreateParams(void **params) { return make_empty(params); }
TN_EXPORT int cusolverDnDestroyParams(void *params) { free(params); return SUCCESS; }
TN_EXPORT int cusolverDnCreateSyevjInfo(void **params) { return make_empty(params); }
TN_EXPORT int cusolverDnDestroySyevjInfo(void *params) { free(params); return SUCCESS; }
TN_EXPORT int cusolverDnXsyevjSetTolerance(void *params, double tolerance) { (void)params, (void)tolerance; return SUCCESS; }
TN_EXPORT int cusolverDnXsyevjSetMaxSweeps(void *params, int sweeps) { (void)params, (void)sweeps; return SUCCESS; }
TN_EXPORT int cusolverDnXsyevjSetSortEig(void *params, int sort) { (void)params, (void)sort; return SUCCESS; }
TN_EXPORT int cusolverDnCreateGesvdjInfo(void **params) { return make_empty(params); }
TN_EXPORT int cusolverDnDestroyGesvdjInfo(void *params) { free(params); return SUCCESS; }
TN_EXPORT int cusolverDnXgesvdjSetTolerance(void *params, double tolerance) { (void)params, (void)tolerance; return SUCCESS; }
TN_EXPORT int cusolverDnXgesvdjSetMaxSweeps(void *params, int sweeps) { (void)params, (void)sweeps; return SUCCESS; }
TN_EXPORT int cusolverDnXgesvdjSetSortEig(void *params, int sort) { (void)params, (void)sort; return SUCCESS; }

// Routines that have the same name for real and complex types. Arguments that say nothing about sizes are left unused.

#pragma GCC diagnostic ignored "-Wunused-parameter"

#define ROUTINES(T, ITEM)                                                                                                      \
  TN_EXPORT int cusolverDn##T##potrf_bufferSize(void *h, int uplo, int n, void *a, int lda, int *elements) {                    \
    return ask_elements("potrf", n, n, 0, 1, ITEM, elements);                                                                  \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##potrf(void *h, int uplo, int n, void *a, int lda, void *work, int size, void *info) {            \
    return succeed("cusolverDn" #T "potrf", info, 1);                                                                          \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##potrfBatched(void *h, int uplo, int n, void *a, int lda, void *info, int batch) {                \
    return succeed("cusolverDn" #T "potrfBatched", info, batch);                                                               \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##potrs(void *h, int uplo, int n, int columns, void *a, int lda, void *b, int ldb, void *info) {   \
    return succeed("cusolverDn" #T "potrs", info, 1);                                                                          \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##potrsBatched(void *h, int uplo, int n, int columns, void *a, int lda, void *b, int ldb,          \
                                            void *info, int batch) {                                                           \
    return succeed("cusolverDn" #T "potrsBatched", info, 1);                                                                   \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##getrf_bufferSize(void *h, int m, int n, void *a, int lda, int *elements) {                       \
    return ask_elements("getrf", m, n, 0, 1, ITEM, elements);                                                                  \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##getrf(void *h, int m, int n, void *a, int lda, void *work, void *pivots, void *info) {           \
    return succeed("cusolverDn" #T "getrf", info, 1);                                                                          \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##getrs(void *h, int transposed, int n, int columns, void *a, int lda, void *pivots, void *b,      \
                                     int ldb, void *info) {                                                                    \
    return succeed("cusolverDn" #T "getrs", info, 1);                                                                          \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##geqrf_bufferSize(void *h, int m, int n, void *a, int lda, int *elements) {                       \
    return ask_elements("geqrf", m, n, 0, 1, ITEM, elements);                                                                  \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##geqrf(void *h, int m, int n, void *a, int lda, void *tau, void *work, int size, void *info) {    \
    return succeed("cusolverDn" #T "geqrf", info, 1);                                                                          \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##gesvdj_bufferSize(void *h, int job, int economy, int m, int n, void *a, int lda, void *s,        \
                                                 void *u, int ldu, void *v, int ldv, int *elements, void *params) {            \
    return ask_elements("gesvdj", m, n, 0, 1, ITEM, elements);                                                                 \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##gesvdj(void *h, int job, int economy, int m, int n, void *a, int lda, void *s, void *u, int ldu, \
                                      void *v, int ldv, void *work, int size, void *info, void *params) {                      \
    return succeed("cusolverDn" #T "gesvdj", info, 1);                                                                         \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##gesvdjBatched_bufferSize(void *h, int job, int m, int n, void *a, int lda, void *s, void *u,     \
                                                        int ldu, void *v, int ldv, int *elements, void *params, int batch) {   \
    return ask_elements("gesvdj", m, n, 0, batch, ITEM, elements);                                                             \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##gesvdjBatched(void *h, int job, int m, int n, void *a, int lda, void *s, void *u, int ldu,       \
                                             void *v, int ldv, void *work, int size, void *info, void *params, int batch) {    \
    return succeed("cusolverDn" #T "gesvdjBatched", info, batch);                                                              \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##gesvdaStridedBatched_bufferSize(                                                                \
      void *h, int job, int rank, int m, int n, void *a, int lda, long long next_a, void *s, long long next_s, void *u, int ldu, \
      long long next_u, void *v, int ldv, long long next_v, int *elements, int batch) {                                        \
    return ask_elements("gesvda", m, n, 0, batch, ITEM, elements);                                                             \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##gesvdaStridedBatched(                                                                           \
      void *h, int job, int rank, int m, int n, void *a, int lda, long long next_a, void *s, long long next_s, void *u, int ldu, \
      long long next_u, void *v, int ldv, long long next_v, void *work, int size, void *info, double *residuals, int batch) {   \
    return succeed("cusolverDn" #T "gesvdaStridedBatched", info, batch);                                                       \
  }

ROUTINES(S, 4)
ROUTINES(D, 8)
ROUTINES(C, 8)
ROUTINES(Z, 16)

// Routines whose names differ.

#define SYMMETRIC(T, SY, ITEM)                                                                                                 \
  TN_EXPORT int cusolverDn##T##SY##evd_bufferSize(void *h, int job, int uplo, int n, void *a, int lda, void *w, int *elements) { \
    return ask_elements("syevd", n, n, 0, 1, ITEM, elements);                                                                  \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##SY##evd(void *h, int job, int uplo, int n, void *a, int lda, void *w, void *work, int size,      \
                                       void *info) {                                                                           \
    return succeed("cusolverDn" #T #SY "evd", info, 1);                                                                        \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##SY##evj_bufferSize(void *h, int job, int uplo, int n, void *a, int lda, void *w, int *elements,  \
                                                  void *params) {                                                              \
    return ask_elements("syevj", n, n, 0, 1, ITEM, elements);                                                                  \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##SY##evj(void *h, int job, int uplo, int n, void *a, int lda, void *w, void *work, int size,      \
                                       void *info, void *params) {                                                             \
    return succeed("cusolverDn" #T #SY "evj", info, 1);                                                                        \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##SY##evjBatched_bufferSize(void *h, int job, int uplo, int n, void *a, int lda, void *w,          \
                                                         int *elements, void *params, int batch) {                             \
    return ask_elements("syev_batched", n, n, 0, batch, ITEM, elements);                                                       \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##SY##evjBatched(void *h, int job, int uplo, int n, void *a, int lda, void *w, void *work,         \
                                              int size, void *info, void *params, int batch) {                                 \
    return succeed("cusolverDn" #T #SY "evjBatched", info, batch);                                                             \
  }

SYMMETRIC(S, sy, 4)
SYMMETRIC(D, sy, 8)
SYMMETRIC(C, he, 8)
SYMMETRIC(Z, he, 16)

#define ORTHOGONAL(T, OR, ITEM)                                                                                                \
  TN_EXPORT int cusolverDn##T##OR##gqr_bufferSize(void *h, int m, int n, int k, void *a, int lda, void *tau, int *elements) {   \
    return ask_elements("orgqr", m, n, k, 1, ITEM, elements);                                                                  \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##OR##gqr(void *h, int m, int n, int k, void *a, int lda, void *tau, void *work, int size,         \
                                       void *info) {                                                                           \
    return succeed("cusolverDn" #T #OR "gqr", info, 1);                                                                        \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##OR##mqr_bufferSize(void *h, int side, int transposed, int m, int n, int k, void *a, int lda,     \
                                                  void *tau, void *c, int ldc, int *elements) {                                \
    return ask_elements("ormqr", m, n, k, 1, ITEM, elements);                                                                  \
  }                                                                                                                            \
  TN_EXPORT int cusolverDn##T##OR##mqr(void *h, int side, int transposed, int m, int n, int k, void *a, int lda, void *tau,     \
                                       void *c, int ldc, void *work, int size, void *info) {                                   \
    return succeed("cusolverDn" #T #OR "mqr", info, 1);                                                                        \
  }

ORTHOGONAL(S, or, 4)
ORTHOGONAL(D, or, 8)
ORTHOGONAL(C, un, 8)
ORTHOGONAL(Z, un, 16)

// The 64-bit routines are told the type. They need no work area on the host.

static int ask_bytes(const char *routine, int64_t rows, int64_t columns, int64_t batch, int type, size_t *device, size_t *host) {
  *host = 0;
  return ask(routine, rows, columns, 0, batch, item_bytes(type), device);
}

TN_EXPORT int cusolverDnXpotrf_bufferSize(void *h, void *params, int uplo, int64_t n, int type, void *a, int64_t lda, int compute,
                                          size_t *device, size_t *host) {
  return ask_bytes("potrf", n, n, 1, type, device, host);
}

TN_EXPORT int cusolverDnXpotrf(void *h, void *params, int uplo, int64_t n, int type, void *a, int64_t lda, int compute,
                               void *device, size_t device_bytes, void *host, size_t host_bytes, void *info) {
  return succeed("cusolverDnXpotrf", info, 1);
}

TN_EXPORT int cusolverDnXpotrs(void *h, void *params, int uplo, int64_t n, int64_t columns, int type, void *a, int64_t lda,
                               int b_type, void *b, int64_t ldb, void *info) {
  return succeed("cusolverDnXpotrs", info, 1);
}

TN_EXPORT int cusolverDnXgeqrf_bufferSize(void *h, void *params, int64_t m, int64_t n, int type, void *a, int64_t lda,
                                          int tau_type, void *tau, int compute, size_t *device, size_t *host) {
  return ask_bytes("geqrf", m, n, 1, type, device, host);
}

TN_EXPORT int cusolverDnXgeqrf(void *h, void *params, int64_t m, int64_t n, int type, void *a, int64_t lda, int tau_type,
                               void *tau, int compute, void *device, size_t device_bytes, void *host, size_t host_bytes,
                               void *info) {
  return succeed("cusolverDnXgeqrf", info, 1);
}

TN_EXPORT int cusolverDnXsyevd_bufferSize(void *h, void *params, int job, int uplo, int64_t n, int type, void *a, int64_t lda,
                                          int w_type, void *w, int compute, size_t *device, size_t *host) {
  return ask_bytes("syevd", n, n, 1, type, device, host);
}

TN_EXPORT int cusolverDnXsyevd(void *h, void *params, int job, int uplo, int64_t n, int type, void *a, int64_t lda, int w_type,
                               void *w, int compute, void *device, size_t device_bytes, void *host, size_t host_bytes,
                               void *info) {
  return succeed("cusolverDnXsyevd", info, 1);
}

TN_EXPORT int cusolverDnXsyevBatched_bufferSize(void *h, void *params, int job, int uplo, int64_t n, int type, void *a,
                                                int64_t lda, int w_type, void *w, int compute, size_t *device, size_t *host,
                                                int64_t batch) {
  return ask_bytes("syev_batched", n, n, batch, type, device, host);
}

TN_EXPORT int cusolverDnXsyevBatched(void *h, void *params, int job, int uplo, int64_t n, int type, void *a, int64_t lda,
                                     int w_type, void *w, int compute, void *device, size_t device_bytes, void *host,
                                     size_t host_bytes, void *info, int64_t batch) {
  return succeed("cusolverDnXsyevBatched", info, batch);
}

TN_EXPORT int cusolverDnXgeev_bufferSize(void *h, void *params, int left, int right, int64_t n, int type, void *a, int64_t lda,
                                         int w_type, void *w, int l_type, void *l, int64_t ldl, int r_type, void *r, int64_t ldr,
                                         int compute, size_t *device, size_t *host) {
  return ask_bytes("geev", n, n, 1, type, device, host);
}

TN_EXPORT int cusolverDnXgeev(void *h, void *params, int left, int right, int64_t n, int type, void *a, int64_t lda, int w_type,
                              void *w, int l_type, void *l, int64_t ldl, int r_type, void *r, int64_t ldr, int compute,
                              void *device, size_t device_bytes, void *host, size_t host_bytes, void *info) {
  return succeed("cusolverDnXgeev", info, 1);
}
