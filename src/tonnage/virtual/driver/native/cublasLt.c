// libcublasLt. A matmul's heuristic answers with one algorithm that needs no workspace beyond the one that the caller offers.
#include "streams.h"

#include <stdlib.h>
#include <string.h>

#define API TN_EXPORT
typedef struct { uint64_t rows, columns; } Layout;
typedef struct { uint8_t algorithm[64]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;

API int cublasLtCreate(void **handle) { return *handle = calloc(1, 64), 0; }
API size_t cublasLtGetVersion(void) { return (size_t)tn_ask("version library=cublas"); }
API size_t cublasLtGetCudartVersion(void) { return (size_t)tn_card.runtime_version; }
API int cublasLtGetProperty(int type, int *value) { long long version = tn_ask("version library=cublas"); return *value = (int)(type == 0 ? version / 10000 : type == 1 ? version / 100 % 100 : version % 100), 0; }
API const char *cublasLtGetStatusName(int status) { return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS"; }
API const char *cublasLtGetStatusString(int status) { return status ? "not supported by the virtual GPU" : "success"; }

API int cublasLtMatmulDescInit_internal(void *made, size_t size, int compute, int scale) { return memset(made, 0, size), 0; }
API int cublasLtMatmulDescGetAttribute(void *of, int attribute, void *value, size_t size, size_t *written) { return memset(value, 0, size), written ? (*written = size, 0) : 0; }
API int cublasLtMatrixLayoutInit_internal(void *made, size_t size, int type, uint64_t rows, uint64_t columns, int64_t leading) { return memset(made, 0, size), *(Layout *)made = (Layout){rows, columns}, 0; }
API int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading) { return *made = calloc(1, 256), cublasLtMatrixLayoutInit_internal(*made, sizeof(Layout), type, rows, columns, leading); }
API int cublasLtMatmulPreferenceInit_internal(void *made, size_t size) { return memset(made, 0, size), 0; }

API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *of, void *a, void *b, void *c, void *d, void *preference, int wanted, Heuristic *found, int *count) {
  if (wanted > 0) memset(found, 0, sizeof *found);
  return *count = wanted > 0, 0;
}
API int cublasLtMatmulAlgoCheck(void *handle, void *of, void *a, void *b, void *c, void *d, const void *algorithm, Heuristic *found) { return memset(found, 0, sizeof *found), 0; }
API int cublasLtMatmulAlgoConfigGetAttribute(const void *of, int attribute, void *value, size_t size, size_t *written) { return memset(value, 0, size), written ? (*written = size, 0) : 0; }
API int cublasLtMatmul(void *handle, void *of, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout, const void *beta, const void *c,
                       void *c_layout, void *d, void *d_layout, const void *algorithm, void *workspace, size_t size, void *stream) {
  // One side of the first operand is a side of the result, whichever way it lies; the other is what is summed over.
  const Layout *left = a_layout, *result = d_layout;
  uint64_t summed = left->rows == result->rows ? left->columns : left->rows;
  tn_log_workspace(workspace, size);
  tn_queue_product(stream, 2.0 * (double)result->rows * (double)result->columns * (double)summed);
  return tn_launch(), 0;
}
