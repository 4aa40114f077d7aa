// Atomics. The runtime runs one thread at a time, so each is a plain access, declared as atomic.
#pragma once
#include "simd.h"

namespace metal {

enum memory_order { memory_order_relaxed };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup,
                    thread_scope_device };

template <class T> struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomic<T> of a type that Metal does not have");
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<uint>;
using atomic_float = atomic<emu_float>;
using atomic_ulong = atomic<ulong>;

// Loads and stores of the object itself, kept away from the access hooks by the runtime.
extern "C" uint64_t emu_peek(const volatile void* p, uint32_t bytes);
extern "C" void emu_poke(volatile void* p, uint32_t bytes, uint64_t value);

template <class T> METAL_FUNC T emu_atomic_read(const volatile atomic<T>* p, uint32_t line,
                                                uint32_t writes) {
  emu_atomic_access((const void*)p, sizeof(T), writes, line);
  return emu_unpack<T>(emu_peek(p, sizeof(T)));
}
template <class T> METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* p, memory_order,
                                                     EMU_LINE) {
  return emu_atomic_read(p, line, 0);
}
template <class T, class U> METAL_FUNC void atomic_store_explicit(volatile atomic<T>* p, U x,
                                                                  memory_order, EMU_LINE) {
  emu_atomic_access((const void*)p, sizeof(T), 2, line);
  emu_poke(p, sizeof(T), emu_pack(T(x)));
}
#define EMU_ATOMIC(name, expr)                                                            \
  template <class T, class U>                                                             \
  METAL_FUNC T atomic_##name##_explicit(volatile atomic<T>* p, U y, memory_order, EMU_LINE) { \
    const T a = emu_atomic_read(p, line, 1), b = T(y);                                    \
    emu_poke(p, sizeof(T), emu_pack(T(expr)));                                            \
    return a;                                                                             \
  }
EMU_ATOMIC(exchange, b)
EMU_ATOMIC(fetch_add, a + b)
EMU_ATOMIC(fetch_sub, a - b)
EMU_ATOMIC(fetch_min, b < a ? b : a)
EMU_ATOMIC(fetch_max, b > a ? b : a)
EMU_ATOMIC(fetch_and, a & b)
EMU_ATOMIC(fetch_or, a | b)
EMU_ATOMIC(fetch_xor, a ^ b)
#undef EMU_ATOMIC
template <class T, class U> METAL_FUNC bool atomic_compare_exchange_weak_explicit(
    volatile atomic<T>* p, T* expected, U desired, memory_order, memory_order, EMU_LINE) {
  const T a = emu_atomic_read(p, line, 1);
  const bool same = emu_pack(a) == emu_pack(*expected);
  if (same) emu_poke(p, sizeof(T), emu_pack(T(desired)));
  else *expected = a;
  return same;
}

}  // namespace metal
