// libnccl: communicators of a process that is alone, or whose peers are stood for elsewhere. Collectives do nothing.
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API TN_EXPORT
typedef struct { char bytes[128]; } UniqueId;
typedef struct { int ranks, rank, device; } Communicator;

void tn_add_outside(int device, int64_t bytes);

static int make(Communicator **made, int ranks, int rank) {
  char question[64];
  Communicator *fresh = calloc(1, sizeof *fresh);
  *fresh = (Communicator){ranks, rank, tn_current_device()};
  snprintf(question, sizeof question, "communicator ranks=%d", ranks);
  long long bytes = tn_ask(question);
  if (bytes > 0) tn_add_outside(fresh->device, bytes);
  return *made = fresh, 0;
}

API int ncclGetVersion(int *version) { return *version = (int)tn_ask("version library=nccl"), 0; }
API int ncclGetUniqueId(UniqueId *id) { return memset(id, 1, sizeof *id), 0; }
API const char *ncclGetErrorString(int status) { return status ? "not supported by the virtual GPU" : "no error"; }
API const char *ncclGetLastError(void *communicator) { return (void)communicator, ""; }
API int ncclCommInitRank(Communicator **made, int ranks, UniqueId id, int rank) { return (void)id, make(made, ranks, rank); }
API int ncclCommInitRankConfig(Communicator **made, int ranks, UniqueId id, int rank, void *config) { return (void)id, (void)config, make(made, ranks, rank); }
API int ncclCommInitRankScalable(Communicator **made, int ranks, int rank, int ids, UniqueId *id, void *config) { return (void)ids, (void)id, (void)config, make(made, ranks, rank); }
API int ncclCommInitAll(Communicator **made, int devices, const int *list) {
  (void)list;
  for (int i = 0; i < devices; i++) make(&made[i], devices, i);
  return 0;
}
API int ncclCommSplit(Communicator *from, int color, int key, Communicator **made, void *config) { return (void)key, (void)config, color < 0 ? (*made = NULL, 0) : make(made, from->ranks, from->rank); }
API int ncclCommFinalize(Communicator *of) { return (void)of, 0; }
API int ncclCommDestroy(Communicator *of) { return free(of), 0; }
API int ncclCommAbort(Communicator *of) { return free(of), 0; }
API int ncclCommGetAsyncError(Communicator *of, int *status) { return (void)of, *status = 0, 0; }
API int ncclCommCount(Communicator *of, int *count) { return *count = of->ranks, 0; }
API int ncclCommUserRank(Communicator *of, int *rank) { return *rank = of->rank, 0; }
API int ncclCommCuDevice(Communicator *of, int *device) { return *device = of->device, 0; }
API int ncclCommRegister(Communicator *of, void *buffer, size_t size, void **handle) { return (void)of, (void)size, *handle = buffer, 0; }
API int ncclCommDeregister(Communicator *of, void *handle) { return (void)of, (void)handle, 0; }
API int ncclGroupStart(void) { return 0; }
API int ncclGroupEnd(void) { return 0; }

// Collectives write into buffers of the caller and allocate nothing on the card.
#define NOTHING(name) API int name(void) { return tn_launch(#name), 0; }
NOTHING(ncclAllReduce) NOTHING(ncclBroadcast) NOTHING(ncclBcast) NOTHING(ncclReduce) NOTHING(ncclAllGather) NOTHING(ncclReduceScatter)
NOTHING(ncclSend) NOTHING(ncclRecv) NOTHING(ncclAlltoAll) NOTHING(ncclGather) NOTHING(ncclScatter)
API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, Communicator *of) { return (void)scalar, (void)type, (void)residence, (void)of, *operation = 5, 0; }
API int ncclRedOpDestroy(int operation, Communicator *of) { return (void)operation, (void)of, 0; }
