// A stand-in for libcusparseLt.so: it tells its version. Products with structured sparsity were not measured: they fail by name.
#include "core.h"

enum { SUCCESS = 0, INVALID_VALUE = 3 };

TN_EXPORT int cusparseLtGetVersion(const void *handle, int *version) {
  *version = (int)tn_ask("version library=cusparselt");
  return SUCCESS;
}

TN_EXPORT int cusparseLtGetProperty(int property, int *value) {
  int version = (int)tn_ask("version library=cusparselt");
  int parts[] = {version / 1000, version / 100 % 10, version % 100};
  if (property < 0 || property > 2) return INVALID_VALUE;
  *value = parts[property];
  return SUCCESS;
}
