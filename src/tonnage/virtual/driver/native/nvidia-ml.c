// libnvidia-ml (NVML): the card as management tools see it. Only this process is on it.
#include "core.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define API TN_EXPORT
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { char old_id[16]; unsigned domain, bus, device, pci_id, subsystem; char id[32]; } Pci;
typedef struct { unsigned gpu, memory; } Utilization;

static int index_of(void *device) { return (int)((uintptr_t)device - 1); }

API const char *nvmlErrorString(int status) { return status ? "Not Supported" : "The operation was successful"; }
API int nvmlSystemGetDriverVersion(char *text, unsigned room) { return snprintf(text, room, "580.00 (virtual)"), 0; }
API int nvmlSystemGetNVMLVersion(char *text, unsigned room) { return snprintf(text, room, "13.580"), 0; }
API int nvmlSystemGetCudaDriverVersion(int *version) { return *version = tn_card.driver_version, 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = tn_card.driver_version, 0; }
API int nvmlDeviceGetCount(unsigned *count) { return *count = (unsigned)tn_card.devices, 0; }
API int nvmlDeviceGetCount_v2(unsigned *count) { return *count = (unsigned)tn_card.devices, 0; }
API int nvmlDeviceGetHandleByIndex(unsigned index, void **device) { return *device = (void *)(uintptr_t)(index + 1), index < (unsigned)tn_card.devices ? 0 : 2; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return nvmlDeviceGetHandleByIndex(index, device); }
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { return *device = (void *)1, 0; }
API int nvmlDeviceGetHandleByPciBusId(const char *text, void **device) {
  unsigned domain = 0, bus = 1;
  sscanf(text, "%x:%x", &domain, &bus);
  return *device = (void *)(uintptr_t)bus, 0;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **device) { return nvmlDeviceGetHandleByPciBusId(text, device); }
API int nvmlDeviceGetIndex(void *device, unsigned *index) { return *index = (unsigned)index_of(device), 0; }
API int nvmlDeviceGetName(void *device, char *text, unsigned room) { return snprintf(text, room, "%s", tn_card.name), 0; }
API int nvmlDeviceGetUUID(void *device, char *text, unsigned room) {
  const uint8_t *u = tn_card.uuid;
  snprintf(text, room, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3], u[4], u[5],
           u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], (u[15] + index_of(device)) & 0xff);
  return 0;
}
API int nvmlDeviceGetPciInfo_v3(void *device, Pci *to) {
  memset(to, 0, sizeof *to);
  to->bus = (unsigned)index_of(device) + 1;
  snprintf(to->id, sizeof to->id, "00000000:%02X:00.0", to->bus);
  return 0;
}
API int nvmlDeviceGetMemoryInfo(void *device, Memory *to) {
  to->total = (unsigned long long)tn_card.memory_bytes, to->used = (unsigned long long)tn_used_bytes(index_of(device));
  return to->free = to->total - to->used, 0;
}
API int nvmlDeviceGetMemoryInfo_v2(void *device, Memory2 *to) {
  to->total = (unsigned long long)tn_card.memory_bytes, to->used = (unsigned long long)tn_used_bytes(index_of(device)), to->reserved = 0;
  return to->free = to->total - to->used, 0;
}
static int processes(void *device, unsigned *count, Process *to) {
  if (*count < 1) return *count = 1, 7;  // NVML_ERROR_INSUFFICIENT_SIZE
  *count = 1;
  *to = (Process){(unsigned)getpid(), (unsigned long long)tn_used_bytes(index_of(device)), ~0u, ~0u};
  return 0;
}
API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, Process *to) { return processes(device, count, to); }
API int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, Process *to) { return processes(device, count, to); }
API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *to) { return processes(device, count, to); }
API int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, Process *to) { return *count = 0, 0; }
API int nvmlDeviceGetUtilizationRates(void *device, Utilization *to) { return *to = (Utilization){100, 50}, 0; }
API int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees) { return *degrees = 40, 0; }
API int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { return *milliwatts = 100000, 0; }
API int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz) { return *mhz = (unsigned)(type == 2 ? tn_card.memory_clock_khz : tn_card.clock_khz) / 1000, 0; }
API int nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned *mhz) { return nvmlDeviceGetClockInfo(device, type, mhz); }
API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { return *major = tn_card.major, *minor = tn_card.minor, 0; }
API int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) { return *active = 0, 0; }
