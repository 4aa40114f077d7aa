// The functions that -fsanitize=thread makes a kernel call at every load and store. The sanitizer
// itself is not linked: these are all there is.
#include "shadow.h"

#include <string.h>

#define PC reinterpret_cast<uint64_t>(__builtin_return_address(0))
#define HOOK(bytes)                                                                          \
  void __tsan_read##bytes(void* p) { check_access(p, bytes, READ, PC, 0); }                  \
  void __tsan_write##bytes(void* p) { check_access(p, bytes, WRITE, PC, 0); }                \
  void __tsan_unaligned_read##bytes(void* p) { check_access(p, bytes, READ, PC, 0); }        \
  void __tsan_unaligned_write##bytes(void* p) { check_access(p, bytes, WRITE, PC, 0); }      \
  void __tsan_volatile_read##bytes(void* p) { check_access(p, bytes, READ, PC, 0); }         \
  void __tsan_volatile_write##bytes(void* p) { check_access(p, bytes, WRITE, PC, 0); }       \
  void __tsan_read_write##bytes(void* p) {                                                   \
    check_access(p, bytes, READ, PC, 0);                                                     \
    check_access(p, bytes, WRITE, PC, 0);                                                    \
  }

extern "C" {
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
void __tsan_read_range(void* p, size_t n) { check_access(p, n, READ, PC, 0); }
void __tsan_write_range(void* p, size_t n) { check_access(p, n, WRITE, PC, 0); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// Block copies: clang calls these, gcc the range hooks above.
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  check_access(from, n, READ, PC, 0);
  check_access(to, n, WRITE, PC, 0);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  check_access(from, n, READ, PC, 0);
  check_access(to, n, WRITE, PC, 0);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  check_access(to, n, WRITE, PC, 0);
  return memset(to, value, n);
}
}
