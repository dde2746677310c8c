// libcublas. Handles are kept apart because torch keys its workspaces by handle and stream; products do nothing.
#include "streams.h"

#include <stdlib.h>

#define API TN_EXPORT
typedef struct { void *stream; int pointer_mode, math_mode, atomics; } Handle;

void tn_use_again(const char *);

API int cublasCreate_v2(Handle **handle) { return *handle = calloc(1, sizeof(Handle)), tn_use_again("cublas"), 0; }
API int cublasGetVersion_v2(Handle *handle, int *version) { return *version = (int)tn_ask("version library=cublas"), 0; }
API int cublasGetProperty(int type, int *value) { long long version = tn_ask("version library=cublas"); return *value = (int)(type == 0 ? version / 10000 : type == 1 ? version / 100 % 100 : version % 100), 0; }
API size_t cublasGetCudartVersion(void) { return (size_t)tn_card.runtime_version; }
API int cublasSetStream_v2(Handle *handle, void *stream) { return handle->stream = stream, 0; }
API int cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t size) { return tn_log_workspace(workspace, size), 0; }
API int cublasGetStream_v2(Handle *handle, void **stream) { return *stream = handle->stream, 0; }
API int cublasSetPointerMode_v2(Handle *handle, int mode) { return handle->pointer_mode = mode, 0; }
API int cublasGetPointerMode_v2(Handle *handle, int *mode) { return *mode = handle->pointer_mode, 0; }
API int cublasSetMathMode(Handle *handle, int mode) { return handle->math_mode = mode, 0; }
API int cublasGetMathMode(Handle *handle, int *mode) { return *mode = handle->math_mode, 0; }
API int cublasSetAtomicsMode(Handle *handle, int mode) { return handle->atomics = mode, 0; }
API int cublasGetAtomicsMode(Handle *handle, int *mode) { return *mode = handle->atomics, 0; }
API int cublasGetSmCountTarget(Handle *handle, int *count) { return *count = 0, 0; }
API const char *cublasGetStatusName(int status) { return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS"; }
API const char *cublasGetStatusString(int status) { return status ? "not supported by the virtual GPU" : "success"; }

// Products, solves and factorisations write into buffers of the caller and allocate nothing: nothing is done.
#define NOTHING(name) API int name(Handle *handle) { return tn_queue(handle->stream), tn_launch(), 0; }
#define PRODUCT(name)                                                                                                             \
  API int name(Handle *handle, int a, int b, int m, int n, int k) {                                                               \
    tn_queue_product(handle->stream, 2.0 * m * n * k);                                                                            \
    return tn_launch(), 0;                                                                                                        \
  }
#define REAL(name) NOTHING(cublasS##name) NOTHING(cublasD##name)
#define COMPLEX(name) NOTHING(cublasC##name) NOTHING(cublasZ##name)
#define ALL(name) REAL(name) COMPLEX(name)
ALL(gemmBatched) ALL(gemmStridedBatched) ALL(gemv_v2) ALL(axpy_v2) ALL(copy_v2) ALL(scal_v2) ALL(swap_v2)
ALL(trsm_v2) ALL(trsmBatched) ALL(getrfBatched) ALL(getriBatched) ALL(matinvBatched)
ALL(trmm_v2) ALL(symm_v2) ALL(syrk_v2) ALL(trmv_v2) ALL(trsv_v2) ALL(gemmBatched_64) ALL(gemm_v2_64) ALL(geam)
REAL(dot_v2) COMPLEX(dotu_v2) COMPLEX(dotc_v2) REAL(ger_v2) COMPLEX(geru_v2) COMPLEX(gerc_v2) REAL(nrm2_v2) REAL(asum_v2) ALL(dgmm)
PRODUCT(cublasGemmEx) PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasCgemm_v2) PRODUCT(cublasZgemm_v2)
NOTHING(cublasGemmStridedBatchedEx) NOTHING(cublasGemmBatchedEx) NOTHING(cublasSgemmEx) NOTHING(cublasDotEx) NOTHING(cublasDotcEx)
NOTHING(cublasHgemm) NOTHING(cublasHgemmStridedBatched) NOTHING(cublasHgemmBatched) NOTHING(cublasGemmGroupedBatchedEx) NOTHING(cublasSgemmGroupedBatched)
NOTHING(cublasDgemmGroupedBatched) NOTHING(cublasScalEx) NOTHING(cublasAxpyEx) NOTHING(cublasNrm2Ex) NOTHING(cublasCgemm3m) NOTHING(cublasGemmEx_64)
NOTHING(cublasGemmStridedBatchedEx_64)

// These tell the host that their arguments were in order.
#define TYPES(define) define(S) define(D) define(C) define(Z)
#define QR(type)                                                                                                                  \
  API int cublas##type##geqrfBatched(Handle *handle, int m, int n, void *a, int lda, void *tau, int *info, int batch) {           \
    return *info = 0, tn_queue(handle->stream), 0;                                                                                \
  }
#define SOLVE(type)                                                                                                               \
  API int cublas##type##getrsBatched(Handle *handle, int op, int n, int columns, void *a, int lda, void *pivots, void *b, int ldb,\
                                     int *info, int batch) {                                                                      \
    return *info = 0, tn_queue(handle->stream), 0;                                                                                \
  }
#define LEAST_SQUARES(type)                                                                                                       \
  API int cublas##type##gelsBatched(Handle *handle, int op, int m, int n, int columns, void *a, int lda, void *c, int ldc,        \
                                    int *info, void *device_info, int batch) {                                                    \
    return *info = 0, tn_queue(handle->stream), 0;                                                                                \
  }
TYPES(QR) TYPES(SOLVE) TYPES(LEAST_SQUARES)
