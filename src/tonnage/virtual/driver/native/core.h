// What every stand-in library shares: the card, its memory, the log of events, and questions to Python.
// A device that computes nothing: addresses are made up, sizes are kept.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define TN_EXPORT __attribute__((visibility("default")))
#define TN_DEVICES 64
#define TN_DIMENSIONS 8

// One row of the catalogue, as CUDA asks for it. Python fills it in before torch is loaded.
typedef struct {
  char name[256];
  uint8_t uuid[16];
  int64_t memory_bytes;
  int64_t shared_per_block, shared_per_block_optin, shared_per_sm;
  int32_t major, minor;
  int32_t binary_version;  // the machine code of torch's wheel that this card runs: 86 on an 8.9
  int32_t sm_count, threads_per_sm, threads_per_block, blocks_per_sm, registers_per_sm;
  int32_t clock_khz, memory_clock_khz, memory_bus_bits, l2_bytes;
  int32_t driver_version, runtime_version;
  int32_t devices;
  int64_t memory_rate, link_rate, matrix_rate;  // bytes a second of its memory and of the link to the host; 16-bit operations
} TnCard;

enum TnKind {
  TN_ALLOC = 1, TN_FREE, TN_SEGMENT_ALLOC, TN_SEGMENT_FREE, TN_SEGMENT_MAP, TN_SEGMENT_UNMAP, TN_OOM,
  TN_HOST_ALLOC, TN_HOST_FREE, TN_HOST_PIN, TN_HOST_SENT,  // of the host; sent: read by a copy to the card
  TN_WORKSPACE  // a library was given a block to work in
};
#define TN_HOST_LARGE (1 << 20)  // smaller blocks of the host are not told
#define TN_FRESH (32 << 20)  // larger blocks of the host are new pages of the system

// One event of the log, in the order in which things happened.
typedef struct {
  int32_t kind, device;
  uint64_t address;
  int64_t size;
  int64_t serial;    // of the outermost operator running on this thread; 0 outside of any
  uint64_t thread;
  int32_t operation; // its name, see tn_name
  int32_t dtype;     // c10::ScalarType; -1: a plain block of bytes
  int32_t dims;
  int32_t reserved;
  int64_t shape[TN_DIMENSIONS];
} TnEvent;

extern TnCard tn_card;
extern int tn_cuda_major;

// Memory of the card. 0: out of memory.
uint64_t tn_take_memory(int device, int64_t size);
int64_t tn_give_memory(uint64_t address);           // or reserved addresses; their size, 0: unknown address
int tn_hold(int device, int64_t size);              // physical memory without an address; 0: not enough
void tn_release(int device, int64_t size);
void tn_end_request(void);                          // torch has its block, or gave up
uint64_t tn_reserve_addresses(int64_t size);        // without memory behind them
int64_t tn_free_bytes(int device);
int64_t tn_used_bytes(int device);
int tn_is_device(const void *pointer);              // its device + 1, or 0 for the host
int64_t tn_size_at(uint64_t address, uint64_t *start);  // of the allocation or reservation around an address

void tn_launch(void);

// The log, what nobody gave a meaning, and what libraries take from the card.
void tn_log(int kind, int device, uint64_t address, int64_t size);
void tn_log_workspace(const void *address, size_t size);  // the caller's block, lent to a library
void tn_unknown(const char *library, const char *name);
void tn_use(const char *library);
long long tn_ask(const char *question);
int tn_current_device(void);
void tn_set_current_device(int device);

// Bytes between host and device: `tn_copy` keeps what host code may read back.
void tn_copy(void *to, const void *from, size_t size);
void tn_fill(void *to, int value, size_t size);
