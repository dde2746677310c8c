// What the translation units of the virtual device share.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>

namespace tonnage {

// The context of every storage on the virtual GPU. Its address was handed out by the Python model of the caching
// allocator and is never dereferenced. `shadow` holds the real bytes where they are known (small integers, masks,
// lengths), so that a script that branches on them takes the branch it would take on the card.
struct Block {
  uint64_t address;
  size_t bytes;
  int32_t device;
  c10::Storage shadow;
  uint32_t session;   // that it belongs to: a block may outlive its virtual GPU and die while another one is open
  int32_t law = 0;    // what is assumed of its values (see laws.cpp); 0 is nothing
  bool guess = false;  // whether the bytes of `shadow` were assumed, or computed from such
};

c10::Allocator* device_allocator();
inline bool some_are_guessed = false;  // whether there ever was a guess: most programs have none to look for
inline void mark_guess(Block& block) {
  block.guess = block.shadow.unsafeGetStorageImpl() != nullptr;
  some_are_guessed = true;
}

// For as long as it lives, what is allocated is a tensor of this shape and type.
struct Describe {
  Describe(c10::IntArrayRef sizes, c10::ScalarType dtype);
  ~Describe();
};
Block* block_of(const at::TensorBase& tensor);

// Host memory (host.cpp).
void* map_lazily(size_t bytes);
void install_host_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// What happens to large host memory, as told to Python: `kind` is one of these.
enum HostEvent { kHostAllocated, kHostFreed, kHostPinned, kHostRead, kHostSent, kHostTick };
void tick_host();  // told at most every 50 ms, so that somebody looks at what nobody tells
void tell_host(HostEvent kind, const void* data, size_t bytes);
// A large tensor of the host is read by a copy: where it is not of our allocator, it may be pages of a file.
void tell_host_read(HostEvent kind, const at::TensorBase& from);
const char* current_operator();

// Host storages whose values were never computed (the weights of a model that is built on the CPU and then moved).
bool is_valueless(const void* data);
void mark_valueless(const void* data);

bool is_open();
uint32_t current_session();
int64_t current_stream_id(int device);
void synchronize();

// Raises in C++ what the Python callback raised.
[[noreturn]] void rethrow_python_error();
// Says that an error cannot be raised here; an interrupt comes again where it can.
void tell_unraisable(PyObject* where);
// What a KeyboardInterrupt becomes on its way through C++: `script.running` knows it.
constexpr const char* INTERRUPTED = "interrupted inside the virtual GPU";

}  // namespace tonnage
