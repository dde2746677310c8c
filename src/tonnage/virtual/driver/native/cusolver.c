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
static int succeed(void *info, int64_t count) {
  tn_launch();
  if (info) tn_fill(info, 0, sizeof(int) * (size_t)count);
  return SUCCESS;
}

TN_EXPORT int cusolverDnCreate(void **handle) {
  tn_use("cusolver");
  return (*handle = malloc(1)) ? SUCCESS : ALLOC_FAILED;
}

// A routine: its name, its arguments, and the status that it returns.
#define ROUTINE(name, arguments, status) TN_EXPORT int cusolverDn##name arguments { return status; }

// Routines that have the same name for real and complex types.

#define ROUTINES(T, ITEM)                                                                                                        \
  ROUTINE(T##potrf_bufferSize, (void *h, int uplo, int n, void *a, int lda, int *elements),                                      \
          ask_elements("potrf", n, n, 0, 1, ITEM, elements))                                                                     \
  ROUTINE(T##potrf, (void *h, int uplo, int n, void *a, int lda, void *work, int size, void *info), succeed(info, 1))            \
  ROUTINE(T##potrfBatched, (void *h, int uplo, int n, void *a, int lda, void *info, int batch), succeed(info, batch))            \
  ROUTINE(T##potrs, (void *h, int uplo, int n, int columns, void *a, int lda, void *b, int ldb, void *info), succeed(info, 1))   \
  ROUTINE(T##potrsBatched, (void *h, int uplo, int n, int columns, void *a, int lda, void *b, int ldb, void *info, int batch),   \
          succeed(info, 1))                                                                                                      \
  ROUTINE(T##getrf_bufferSize, (void *h, int m, int n, void *a, int lda, int *elements),                                         \
          ask_elements("getrf", m, n, 0, 1, ITEM, elements))                                                                     \
  ROUTINE(T##getrf, (void *h, int m, int n, void *a, int lda, void *work, void *pivots, void *info), succeed(info, 1))           \
  ROUTINE(T##getrs, (void *h, int transposed, int n, int columns, void *a, int lda, void *pivots, void *b, int ldb, void *info), \
          succeed(info, 1))                                                                                                      \
  ROUTINE(T##geqrf_bufferSize, (void *h, int m, int n, void *a, int lda, int *elements),                                         \
          ask_elements("geqrf", m, n, 0, 1, ITEM, elements))                                                                     \
  ROUTINE(T##geqrf, (void *h, int m, int n, void *a, int lda, void *tau, void *work, int size, void *info), succeed(info, 1))    \
  ROUTINE(T##gesvdj_bufferSize, (void *h, int job, int economy, int m, int n, void *a, int lda, void *s, void *u, int ldu,       \
          void *v, int ldv, int *elements, void *params), ask_elements("gesvdj", m, n, 0, 1, ITEM, elements))                    \
  ROUTINE(T##gesvdj, (void *h, int job, int economy, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v,         \
          int ldv, void *work, int size, void *info, void *params), succeed(info, 1))                                            \
  ROUTINE(T##gesvdjBatched_bufferSize, (void *h, int job, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v,    \
          int ldv, int *elements, void *params, int batch), ask_elements("gesvdj", m, n, 0, batch, ITEM, elements))              \
  ROUTINE(T##gesvdjBatched, (void *h, int job, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v, int ldv,      \
          void *work, int size, void *info, void *params, int batch), succeed(info, batch))                                      \
  ROUTINE(T##gesvdaStridedBatched_bufferSize, (void *h, int job, int rank, int m, int n, void *a, int lda, long long next_a,     \
          void *s, long long next_s, void *u, int ldu, long long next_u, void *v, int ldv, long long next_v, int *elements,      \
          int batch), ask_elements("gesvda", m, n, 0, batch, ITEM, elements))                                                    \
  ROUTINE(T##gesvdaStridedBatched, (void *h, int job, int rank, int m, int n, void *a, int lda, long long next_a, void *s,       \
          long long next_s, void *u, int ldu, long long next_u, void *v, int ldv, long long next_v, void *work, int size,        \
          void *info, double *residuals, int batch), succeed(info, batch))

ROUTINES(S, 4)
ROUTINES(D, 8)
ROUTINES(C, 8)
ROUTINES(Z, 16)

// Symmetric matrices, also complex ones that are not Hermitian.

#define INDEFINITE(T, ITEM)                                                                                                   \
  ROUTINE(T##sytrf_bufferSize, (void *h, int n, void *a, int lda, int *elements),                                             \
          ask_elements("sytrf", n, n, 0, 1, ITEM, elements))                                                                  \
  ROUTINE(T##sytrf, (void *h, int uplo, int n, void *a, int lda, void *pivots, void *work, int size, void *info),             \
          succeed(info, 1))

INDEFINITE(S, 4)
INDEFINITE(D, 8)
INDEFINITE(C, 8)
INDEFINITE(Z, 16)

// Routines whose names differ.

#define SYMMETRIC(T, SY, ITEM)                                                                                                \
  ROUTINE(T##SY##evd_bufferSize, (void *h, int job, int uplo, int n, void *a, int lda, void *w, int *elements),               \
          ask_elements("syevd", n, n, 0, 1, ITEM, elements))                                                                  \
  ROUTINE(T##SY##evd, (void *h, int job, int uplo, int n, void *a, int lda, void *w, void *work, int size, void *info),       \
          succeed(info, 1))                                                                                                   \
  ROUTINE(T##SY##evj_bufferSize, (void *h, int job, int uplo, int n, void *a, int lda, void *w, int *elements, void *params), \
          ask_elements("syevj", n, n, 0, 1, ITEM, elements))                                                                  \
  ROUTINE(T##SY##evj, (void *h, int job, int uplo, int n, void *a, int lda, void *w, void *work, int size, void *info,        \
          void *params), succeed(info, 1))                                                                                    \
  ROUTINE(T##SY##evjBatched_bufferSize, (void *h, int job, int uplo, int n, void *a, int lda, void *w, int *elements,         \
          void *params, int batch), ask_elements("syev_batched", n, n, 0, batch, ITEM, elements))                             \
  ROUTINE(T##SY##evjBatched, (void *h, int job, int uplo, int n, void *a, int lda, void *w, void *work, int size, void *info, \
          void *params, int batch), succeed(info, batch))

SYMMETRIC(S, sy, 4)
SYMMETRIC(D, sy, 8)
SYMMETRIC(C, he, 8)
SYMMETRIC(Z, he, 16)

#define ORTHOGONAL(T, OR, ITEM)                                                                                                 \
  ROUTINE(T##OR##gqr_bufferSize, (void *h, int m, int n, int k, void *a, int lda, void *tau, int *elements),                    \
          ask_elements("orgqr", m, n, k, 1, ITEM, elements))                                                                    \
  ROUTINE(T##OR##gqr, (void *h, int m, int n, int k, void *a, int lda, void *tau, void *work, int size, void *info),            \
          succeed(info, 1))                                                                                                     \
  ROUTINE(T##OR##mqr_bufferSize, (void *h, int side, int transposed, int m, int n, int k, void *a, int lda, void *tau, void *c, \
          int ldc, int *elements), ask_elements("ormqr", m, n, k, 1, ITEM, elements))                                           \
  ROUTINE(T##OR##mqr, (void *h, int side, int transposed, int m, int n, int k, void *a, int lda, void *tau, void *c, int ldc,   \
          void *work, int size, void *info), succeed(info, 1))

ORTHOGONAL(S, or, 4)
ORTHOGONAL(D, or, 8)
ORTHOGONAL(C, un, 8)
ORTHOGONAL(Z, un, 16)

// The 64-bit routines are told the type. They need no work area on the host.

static int ask_bytes(const char *routine, int64_t rows, int64_t columns, int64_t batch, int type, size_t *device, size_t *host) {
  *host = 0;
  return ask(routine, rows, columns, 0, batch, item_bytes(type), device);
}

ROUTINE(Xpotrf_bufferSize, (void *h, void *params, int uplo, int64_t n, int type, void *a, int64_t lda, int compute,
        size_t *device, size_t *host), ask_bytes("potrf", n, n, 1, type, device, host))
ROUTINE(Xpotrf, (void *h, void *params, int uplo, int64_t n, int type, void *a, int64_t lda, int compute, void *device,
        size_t device_bytes, void *host, size_t host_bytes, void *info), succeed(info, 1))
ROUTINE(Xpotrs, (void *h, void *params, int uplo, int64_t n, int64_t columns, int type, void *a, int64_t lda, int b_type, void *b,
        int64_t ldb, void *info), succeed(info, 1))
ROUTINE(Xsytrs_bufferSize, (void *h, int uplo, int64_t n, int64_t columns, int type, void *a, int64_t lda, void *pivots, int b_type,
        void *b, int64_t ldb, size_t *device, size_t *host), ask_bytes("sytrs", n, columns, 1, type, device, host))
ROUTINE(Xsytrs, (void *h, int uplo, int64_t n, int64_t columns, int type, void *a, int64_t lda, void *pivots, int b_type, void *b,
        int64_t ldb, void *device, size_t device_bytes, void *host, size_t host_bytes, void *info), succeed(info, 1))
ROUTINE(Xgeqrf_bufferSize, (void *h, void *params, int64_t m, int64_t n, int type, void *a, int64_t lda, int tau_type, void *tau,
        int compute, size_t *device, size_t *host), ask_bytes("geqrf", m, n, 1, type, device, host))
ROUTINE(Xgeqrf, (void *h, void *params, int64_t m, int64_t n, int type, void *a, int64_t lda, int tau_type, void *tau,
        int compute, void *device, size_t device_bytes, void *host, size_t host_bytes, void *info), succeed(info, 1))
ROUTINE(Xsyevd_bufferSize, (void *h, void *params, int job, int uplo, int64_t n, int type, void *a, int64_t lda, int w_type,
        void *w, int compute, size_t *device, size_t *host), ask_bytes("syevd", n, n, 1, type, device, host))
ROUTINE(Xsyevd, (void *h, void *params, int job, int uplo, int64_t n, int type, void *a, int64_t lda, int w_type, void *w,
        int compute, void *device, size_t device_bytes, void *host, size_t host_bytes, void *info), succeed(info, 1))
ROUTINE(XsyevBatched_bufferSize, (void *h, void *params, int job, int uplo, int64_t n, int type, void *a, int64_t lda, int w_type,
        void *w, int compute, size_t *device, size_t *host, int64_t batch),
        ask_bytes("syev_batched", n, n, batch, type, device, host))
ROUTINE(XsyevBatched, (void *h, void *params, int job, int uplo, int64_t n, int type, void *a, int64_t lda, int w_type, void *w,
        int compute, void *device, size_t device_bytes, void *host, size_t host_bytes, void *info, int64_t batch),
        succeed(info, batch))
ROUTINE(Xgeev_bufferSize, (void *h, void *params, int left, int right, int64_t n, int type, void *a, int64_t lda, int w_type,
        void *w, int l_type, void *l, int64_t ldl, int r_type, void *r, int64_t ldr, int compute, size_t *device, size_t *host),
        ask_bytes("geev", n, n, 1, type, device, host))
ROUTINE(Xgeev, (void *h, void *params, int left, int right, int64_t n, int type, void *a, int64_t lda, int w_type, void *w,
        int l_type, void *l, int64_t ldl, int r_type, void *r, int64_t ldr, int compute, void *device, size_t device_bytes,
        void *host, size_t host_bytes, void *info), succeed(info, 1))
