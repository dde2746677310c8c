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

TN_EXPORT int cusparseCreate(void **handle) {
  tn_use("cusparse");
  return (*handle = malloc(1)) ? SUCCESS : ALLOC_FAILED;
}

// Matrices and vectors.

static int make_sparse(Sparse **made, int64_t rows, int64_t columns, int64_t elements) {
  if (!(*made = malloc(sizeof **made))) return ALLOC_FAILED;
  **made = (Sparse){rows, columns, elements};
  return SUCCESS;
}

TN_EXPORT int cusparseCreateCsr(Sparse **matrix, int64_t rows, int64_t columns, int64_t elements, void *row_offsets,
                                void *column_indices, void *values, int row_type, int column_type, int base, int type) {
  return make_sparse(matrix, rows, columns, elements);
}

TN_EXPORT int cusparseCreateCoo(Sparse **matrix, int64_t rows, int64_t columns, int64_t elements, void *row_indices,
                                void *column_indices, void *values, int index_type, int base, int type) {
  return make_sparse(matrix, rows, columns, elements);
}

TN_EXPORT int cusparseSpMatGetSize(const Sparse *matrix, int64_t *rows, int64_t *columns, int64_t *elements) {
  *rows = matrix->rows, *columns = matrix->columns, *elements = matrix->elements;
  return SUCCESS;
}

// A sparse matrix by a dense one.

TN_EXPORT int cusparseSpMM_bufferSize(void *handle, int a_operation, int b_operation, const void *alpha, const Sparse *a,
                                      const void *b, const void *beta, const void *c, int compute, int algorithm,
                                      size_t *bytes) {
  char question[96];
  snprintf(question, sizeof question, "sparse routine=spmm algorithm=%d elements=%lld", algorithm, (long long)a->elements);
  long long answer = tn_ask(question);
  if (answer < 0) return NOT_SUPPORTED;
  *bytes = (size_t)answer;
  return SUCCESS;
}
