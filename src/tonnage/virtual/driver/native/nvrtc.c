// libnvrtc: programs are taken and never compiled, since their kernels are never run.
#include "core.h"

#include <stdlib.h>
#include <string.h>

#define API TN_EXPORT
static const char code[] = "// no machine code: the virtual GPU runs no kernels\n";
typedef struct { char *name; } Program;

API int nvrtcVersion(int *major, int *minor) { return *major = tn_card.runtime_version / 1000, *minor = tn_card.runtime_version % 1000 / 10, 0; }
API const char *nvrtcGetErrorString(int status) { return status ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }
API int nvrtcCreateProgram(Program **made, const char *source, const char *name, int count, const char *const *headers, const char *const *names) { return *made = calloc(1, sizeof(Program)), 0; }
API int nvrtcDestroyProgram(Program **gone) { return free((*gone)->name), free(*gone), *gone = NULL, 0; }
API int nvrtcAddNameExpression(Program *program, const char *name) { return program->name = strdup(name), 0; }
API int nvrtcGetLoweredName(Program *program, const char *expression, const char **name) { return *name = expression, 0; }
API int nvrtcGetPTXSize(Program *program, size_t *size) { return *size = sizeof code, 0; }
API int nvrtcGetPTX(Program *program, char *to) { return memcpy(to, code, sizeof code), 0; }
API int nvrtcGetCUBINSize(Program *program, size_t *size) { return *size = sizeof code, 0; }
API int nvrtcGetCUBIN(Program *program, char *to) { return memcpy(to, code, sizeof code), 0; }
API int nvrtcGetProgramLogSize(Program *program, size_t *size) { return *size = 1, 0; }
API int nvrtcGetProgramLog(Program *program, char *to) { return *to = 0, 0; }
API int nvrtcGetNumSupportedArchs(int *count) { return *count = 0, 0; }
