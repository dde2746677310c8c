// A stand-in for libcusparse.so: descriptors keep their sizes, the buffer of a product of a sparse and a dense matrix comes from
// Python, nothing is computed. Other products and solves were not measured: they are left to fail by name.
#include "core.h"

#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, ALLOC_FAILED = 2, NOT_SUPPORTED = 10 };

typedef struct { int64_t rows, columns, elements; } Sparse;

TN_EXPORT const char *cusparseGetErrorString(int status) {
  return status == SUCCESS ? "success" : status == NOT_SUPPORTED ? "operation not supported by the virtual GPU" : "failed";
}

TN_EXPORT const char *cusparseGetErrorName(int status) {
  return status == SUCCESS ? "CUSPARSE_STATUS_SUCCESS" : "CUSPARSE_STATUS_NOT_SUPPORTED";
}

// Handles and descriptors of the older interface: they hold nothing.

static int make_empty(void **made) { return (*made = malloc(1)) ? SUCCESS : ALLOC_FAILED; }

TN_EXPORT int cusparseCreate(void **handle) {
  tn_use("cusparse");
  return make_empty(handle);
}

TN_EXPORT int cusparseDestroy(void *handle) { free(handle); return SUCCESS; }
TN_EXPORT int cusparseSetStream(void *handle, void *stream) { (void)handle, (void)stream; return SUCCESS; }
TN_EXPORT int cusparseSetPointerMode(void *handle, int mode) { (void)handle, (void)mode; return SUCCESS; }
TN_EXPORT int cusparseCreateMatDescr(void **matrix) { return make_empty(matrix); }
TN_EXPORT int cusparseDestroyMatDescr(void *matrix) { free(matrix); return SUCCESS; }
TN_EXPORT int cusparseSetMatDiagType(void *matrix, int type) { (void)matrix, (void)type; return SUCCESS; }
TN_EXPORT int cusparseSetMatFillMode(void *matrix, int mode) { (void)matrix, (void)mode; return SUCCESS; }
TN_EXPORT int cusparseSetMatIndexBase(void *matrix, int base) { (void)matrix, (void)base; return SUCCESS; }
TN_EXPORT int cusparseSetMatType(void *matrix, int type) { (void)matrix, (void)type; return SUCCESS; }

// Matrices and vectors.

static int make_sparse(Sparse **made, int64_t rows, int64_t columns, int64_t elements) {
  if (!(*made = malloc(sizeof **made))) return ALLOC_FAILED;
  **made = (Sparse){rows, columns, elements};
  return SUCCESS;
}

TN_EXPORT int cusparseCreateCsr(Sparse **matrix, int64_t rows, int64_t columns, int64_t elements, void *row_offsets,
                                void *column_indices, void *values, int row_type, int column_type, int base, int type) {
  (void)row_offsets, (void)column_indices, (void)values, (void)row_type, (void)column_type, (void)base, (void)type;
  return make_sparse(matrix, rows, columns, elements);
}

TN_EXPORT int cusparseCreateCoo(Sparse **matrix, int64_t rows, int64_t columns, int64_t elements, void *row_indices,
                                void *column_indices, void *values, int index_type, int base, int type) {
  (void)row_indices, (void)column_indices, (void)values, (void)index_type, (void)base, (void)type;
  return make_sparse(matrix, rows, columns, elements);
}

TN_EXPORT int cusparseCsrSetStridedBatch(Sparse *matrix, int batch, int64_t offsets_stride, int64_t values_stride) {
  (void)matrix, (void)batch, (void)offsets_stride, (void)values_stride;
  return SUCCESS;
}

TN_EXPORT int cusparseCsrSetPointers(Sparse *matrix, void *row_offsets, void *column_indices, void *values) {
  (void)matrix, (void)row_offsets, (void)column_indices, (void)values;
  return SUCCESS;
}

TN_EXPORT int cusparseSpMatGetSize(const Sparse *matrix, int64_t *rows, int64_t *columns, int64_t *elements) {
  *rows = matrix->rows, *columns = matrix->columns, *elements = matrix->elements;
  return SUCCESS;
}

TN_EXPORT int cusparseSpMatSetAttribute(Sparse *matrix, int attribute, void *data, size_t size) {
  (void)matrix, (void)attribute, (void)data, (void)size;
  return SUCCESS;
}

TN_EXPORT int cusparseDestroySpMat(Sparse *matrix) { free(matrix); return SUCCESS; }

TN_EXPORT int cusparseCreateDnMat(void **matrix, int64_t rows, int64_t columns, int64_t leading, void *values, int type,
                                  int order) {
  (void)rows, (void)columns, (void)leading, (void)values, (void)type, (void)order;
  return make_empty(matrix);
}

TN_EXPORT int cusparseDnMatSetStridedBatch(void *matrix, int batch, int64_t stride) {
  (void)matrix, (void)batch, (void)stride;
  return SUCCESS;
}

TN_EXPORT int cusparseDestroyDnMat(void *matrix) { free(matrix); return SUCCESS; }

TN_EXPORT int cusparseCreateDnVec(void **vector, int64_t size, void *values, int type) {
  (void)size, (void)values, (void)type;
  return make_empty(vector);
}

TN_EXPORT int cusparseDestroyDnVec(void *vector) { free(vector); return SUCCESS; }

// A sparse matrix by a dense one.

TN_EXPORT int cusparseSpMM_bufferSize(void *handle, int a_operation, int b_operation, const void *alpha, const Sparse *a,
                                      const void *b, const void *beta, const void *c, int compute, int algorithm,
                                      size_t *bytes) {
  (void)handle, (void)a_operation, (void)b_operation, (void)alpha, (void)b, (void)beta, (void)c, (void)compute;
  char question[96];
  snprintf(question, sizeof question, "sparse routine=spmm algorithm=%d elements=%lld", algorithm, (long long)a->elements);
  long long answer = tn_ask(question);
  if (answer < 0) return NOT_SUPPORTED;
  *bytes = (size_t)answer;
  return SUCCESS;
}

// Nothing is computed. The arguments do not matter, so they are not declared.
TN_EXPORT int cusparseSpMM(void) { tn_launch("cusparseSpMM"); return SUCCESS; }
TN_EXPORT int cusparseXcoo2csr(void) { tn_launch("cusparseXcoo2csr"); return SUCCESS; }
