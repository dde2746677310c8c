// libnccl: communicators of a process that is alone, or whose peers are stood for elsewhere. Collectives do nothing.
#include "core.h"

#include <stdlib.h>
#include <string.h>

#define API TN_EXPORT
typedef struct { char bytes[128]; } UniqueId;
typedef struct { int ranks, rank, device; } Communicator;

static int make(Communicator **made, int ranks, int rank) {
  *made = calloc(1, sizeof **made);
  **made = (Communicator){ranks, rank, tn_current_device()};
  return 0;
}

API int ncclGetVersion(int *version) { return *version = (int)tn_ask("version library=nccl"), 0; }
API int ncclGetUniqueId(UniqueId *id) { return memset(id, 1, sizeof *id), 0; }
API const char *ncclGetErrorString(int status) { return status ? "not supported by the virtual GPU" : "no error"; }
API const char *ncclGetLastError(void *communicator) { return ""; }
API int ncclCommInitRank(Communicator **made, int ranks, UniqueId id, int rank) { return make(made, ranks, rank); }
API int ncclCommInitRankConfig(Communicator **made, int ranks, UniqueId id, int rank, void *config) { return make(made, ranks, rank); }
API int ncclCommInitRankScalable(Communicator **made, int ranks, int rank, int ids, UniqueId *id, void *config) { return make(made, ranks, rank); }
API int ncclCommInitAll(Communicator **made, int devices, const int *list) {
  for (int i = 0; i < devices; i++) make(&made[i], devices, i);
  return 0;
}
API int ncclCommSplit(Communicator *from, int color, int key, Communicator **made, void *config) { return color < 0 ? (*made = NULL, 0) : make(made, from->ranks, from->rank); }
API int ncclCommGetAsyncError(Communicator *of, int *status) { return *status = 0, 0; }
API int ncclCommCount(Communicator *of, int *count) { return *count = of->ranks, 0; }
API int ncclCommUserRank(Communicator *of, int *rank) { return *rank = of->rank, 0; }
API int ncclCommCuDevice(Communicator *of, int *device) { return *device = of->device, 0; }
API int ncclCommRegister(Communicator *of, void *buffer, size_t size, void **handle) { return *handle = buffer, 0; }
API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, Communicator *of) { return *operation = 5, 0; }
