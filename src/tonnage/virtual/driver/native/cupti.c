// libcupti: nothing is traced. Whoever asks why gets words, as the profiler of torch builds a string of them.
#include "core.h"

TN_EXPORT int cuptiGetResultString(int status, const char **words) { return *words = status ? "not supported by the virtual GPU" : "no error", 0; }
TN_EXPORT int cuptiGetErrorMessage(int status, const char **words) { return cuptiGetResultString(status, words); }
// Torch's profiler asks for these when it begins, and does without where they fail. Tonnage begins it in every run.
TN_EXPORT int cuptiSubscribe(void **subscriber, void *callback, void *data) { return 27; }
TN_EXPORT int cuptiGetVersion(unsigned *version) { return 27; }
