enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
template <class T> METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  return const_cast<const volatile T&>(p->value);
}
template <class T, class U>
METAL_FUNC void atomic_store_explicit(volatile atomic<T>* p, U x, memory_order) {
  const_cast<volatile T&>(p->value) = T(x);
}
#define EMU_ATOMIC(name, function)                                                   \
  template <class T, class U>                                                        \
  METAL_FUNC T atomic_##name##_explicit(volatile atomic<T>* p, U x, memory_order) {  \
    return function(const_cast<T*>(&p->value), T(x));                                \
  }
EMU_ATOMIC(exchange, ::atomicExch)
EMU_ATOMIC(fetch_add, ::atomicAdd)
EMU_ATOMIC(fetch_min, ::atomicMin)
EMU_ATOMIC(fetch_max, ::atomicMax)
EMU_ATOMIC(fetch_and, ::atomicAnd)
EMU_ATOMIC(fetch_or, ::atomicOr)
EMU_ATOMIC(fetch_xor, ::atomicXor)
#undef EMU_ATOMIC

}  // namespace metal
using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;
