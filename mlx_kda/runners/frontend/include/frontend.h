// Declarations of the Metal standard library for a strict check by clang: real address spaces,
// the compiler's own vector, half and bfloat types. Nothing here is ever run.
#pragma once

typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

typedef _Float16 half;
typedef __bf16 bfloat;
typedef float emu_float;

#include "traits.h"
#include "numbers.h"

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel

namespace metal {

template <class T> struct remove_addrspace { using type = T; };
template <class T> struct remove_addrspace<device T> { using type = T; };
template <class T> struct remove_addrspace<constant T> { using type = T; };
template <class T> struct remove_addrspace<threadgroup T> { using type = T; };
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class V> struct emu_info {
  using elem = V;
  static constexpr int n = 1;
};
template <class T, int N> struct emu_info<vec<T, N>> {
  using elem = T;
  static constexpr int n = N;
};
template <class V> using emu_elem = typename emu_info<V>::elem;
template <class V> constexpr bool emu_floats = emu_float_v<emu_elem<V>>;
template <class V> constexpr bool emu_numbers = emu_scalar_v<emu_elem<V>>;
// simd_* and quad_* take numbers of at most four bytes.
template <class V> constexpr bool emu_lanes = emu_numbers<V> && sizeof(emu_elem<V>) <= 4 &&
                                              !is_same_v<emu_elem<V>, bool>;
template <bool B> using only = enable_if_t<B, int>;

// A vector from numbers and vectors whose components add up to its own.
template <class... A> struct emu_sum;
template <> struct emu_sum<> { static constexpr int n = 0; };
template <class A, class... B> struct emu_sum<A, B...> {
  static constexpr int n = emu_info<A>::n + emu_sum<B...>::n;
};
template <class V, class... A> V emu_make(A...) {
  static_assert(emu_sum<A...>::n == emu_info<V>::n || emu_sum<A...>::n == 1,
                "a vector constructor with the wrong number of components");
  return V{};
}

}  // namespace metal

template <class To, class From> METAL_FUNC constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
  return (void)x, To{};
}

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

namespace metal {
using ::mem_flags;
using ::as_type;
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define F1(name) template <class T, only<emu_floats<T>> = 0> T name(T);
#define F2(name) template <class T, only<emu_floats<T>> = 0> T name(T, T);
#define F3(name) template <class T, only<emu_floats<T>> = 0> T name(T, T, T);
#define MATH                                                                                    \
  F1(exp) F1(exp2) F1(exp10) F1(log) F1(log2) F1(log10) F1(sin) F1(cos) F1(tan) F1(sinpi)       \
  F1(cospi) F1(asin) F1(acos) F1(atan) F1(sinh) F1(cosh) F1(tanh) F1(asinh) F1(acosh) F1(atanh) \
  F1(sqrt) F1(rsqrt) F1(floor) F1(ceil) F1(round) F1(rint) F1(trunc) F1(fract) F1(fabs)         \
  F2(fmin) F2(fmax) F2(fmod) F2(fdim) F2(pow) F2(powr) F2(atan2) F2(divide)
MATH
namespace fast { MATH }
namespace precise { MATH }
F2(copysign) F2(nextafter) F1(sign) F1(saturate) F3(fma) F3(mix) F2(step) F3(smoothstep)
F1(normalize)
#undef F1
#undef F2
#undef F3
#undef MATH
#define N1(name) template <class T, only<emu_numbers<T>> = 0> T name(T);
#define N2(name) template <class T, only<emu_numbers<T>> = 0> T name(T, T);
N1(abs) N2(min) N2(max)
template <class T, only<emu_numbers<T>> = 0> T clamp(T, T, T);
template <class T, int N> vec<T, N> clamp(vec<T, N>, T, T);
template <class T, int N> vec<T, N> min(vec<T, N>, T);
template <class T, int N> vec<T, N> max(vec<T, N>, T);
template <class T> T min3(T, T, T);
template <class T> T max3(T, T, T);
N1(popcount) N1(clz) N1(ctz) N2(mulhi) N2(rotate) N1(reverse_bits) N2(absdiff) N2(addsat) N2(subsat)
#undef N1
#undef N2
template <class T> T extract_bits(T, uint, uint);
template <class T> T ldexp(T, int);
template <class T> T frexp(T, int&);
template <class T> T modf(T, T&);
template <class T> T sincos(T, T&);
template <class T> bool isnan(T);
template <class T> bool isinf(T);
template <class T> bool isfinite(T);
template <class T> bool isnormal(T);
template <class T> bool signbit(T);
template <class T, class C> T select(T, T, C);
template <class T> bool all(T);
template <class T> bool any(T);
template <class T, int N> T dot(vec<T, N>, vec<T, N>);
template <class T, int N> T length(vec<T, N>);
template <class T, int N> T length_squared(vec<T, N>);
template <class T, int N> T distance(vec<T, N>, vec<T, N>);
template <class T> vec<T, 3> cross(vec<T, 3>, vec<T, 3>);

#define S1(name) template <class T, only<emu_lanes<T>> = 0> T name(T);
#define S2(name) template <class T, only<emu_lanes<T>> = 0> T name(T, ushort);
#define GROUP(p)                                                                              \
  S1(p##_sum) S1(p##_product) S1(p##_min) S1(p##_max) S1(p##_and) S1(p##_or) S1(p##_xor)      \
  S1(p##_prefix_inclusive_sum) S1(p##_prefix_exclusive_sum) S1(p##_prefix_inclusive_product)  \
  S1(p##_prefix_exclusive_product) S1(p##_broadcast_first) S2(p##_broadcast) S2(p##_shuffle)  \
  S2(p##_shuffle_xor) S2(p##_shuffle_up) S2(p##_shuffle_down) S2(p##_shuffle_rotate_up)       \
  S2(p##_shuffle_rotate_down) bool p##_all(bool); bool p##_any(bool);
GROUP(simd)
GROUP(quad)
#undef S1
#undef S2
#undef GROUP
template <class T, only<emu_lanes<T>> = 0> T simd_shuffle_and_fill_up(T, T, ushort);
template <class T, only<emu_lanes<T>> = 0> T simd_shuffle_and_fill_down(T, T, ushort);
struct simd_vote {
  using vote_t = ulong;
  explicit simd_vote(vote_t);
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_is_first();

// Apple does not say what thread_elements() is: an element by its index is what shipped kernels use.
template <class T> struct emu_elements {
  T& operator[](int);
  const T& operator[](int) const;
};
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8 && emu_float_v<T>, "simdgroup_matrix is 8 x 8, of floats");
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  emu_elements<T>& thread_elements();
  vec<T, 2> elements;
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
template <class T, int R, int C = R> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define LOAD_STORE(space)                                                                      \
  template <class T> void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*,           \
                                         ulong = 8, vec<ulong, 2> = 0, bool = false);          \
  template <class T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8,      \
                                          vec<ulong, 2> = 0, bool = false);
LOAD_STORE(device)
LOAD_STORE(threadgroup)
#undef LOAD_STORE
template <class D, class A, class B> void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);
template <class D, class A, class B, class C> void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>,
    simdgroup_matrix<C, 8, 8>);
template <class T> simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8>,
                                                       simdgroup_matrix<T, 8, 8>);

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T emu_value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;
#define UPDATE(space, name) \
  template <class T> T atomic_##name##_explicit(volatile space atomic<T>*, T, memory_order);
#define ATOMICS(space)                                                                        \
  UPDATE(space, exchange) UPDATE(space, fetch_add) UPDATE(space, fetch_sub)                   \
  UPDATE(space, fetch_min) UPDATE(space, fetch_max) UPDATE(space, fetch_and)                  \
  UPDATE(space, fetch_or) UPDATE(space, fetch_xor)                                            \
  template <class T> T atomic_load_explicit(const volatile space atomic<T>*, memory_order);   \
  template <class T> void atomic_store_explicit(volatile space atomic<T>*, T, memory_order);  \
  template <class T> bool atomic_compare_exchange_weak_explicit(                              \
      volatile space atomic<T>*, T*, T, memory_order, memory_order);
ATOMICS(device)
ATOMICS(threadgroup)
#undef ATOMICS
#undef UPDATE

struct os_log {
  constexpr os_log(constant char*, constant char*) {}
  template <class... A> void log_debug(constant char*, A...) const {}
};
}  // namespace metal

#define NAMES(T, name)                                                                        \
  typedef metal::vec<T, 2> name##2;                                                           \
  typedef metal::vec<T, 3> name##3;                                                           \
  typedef metal::vec<T, 4> name##4;                                                           \
  struct packed_##name##3 {                                                                   \
    T x, y, z;                                                                                \
    packed_##name##3() = default;                                                             \
    packed_##name##3(const device packed_##name##3&);                                         \
    packed_##name##3(const threadgroup packed_##name##3&);                                    \
    packed_##name##3(name##3);                                                                \
    operator name##3() const;                                                                 \
  };
#define ALL_NAMES                                                                             \
  NAMES(bool, bool) NAMES(char, char) NAMES(uchar, uchar) NAMES(short, short)                 \
  NAMES(ushort, ushort) NAMES(int, int) NAMES(uint, uint) NAMES(long, long)                   \
  NAMES(ulong, ulong) NAMES(half, half) NAMES(bfloat, bfloat) NAMES(float, float)
ALL_NAMES
namespace metal {
using ::bfloat2;
using ::float2;
using ::float3;
using ::float4;
using ::half2;
using ::half4;
using ::int2;
using ::uint2;
using ::uint3;
using ::ulong2;
}  // namespace metal
#undef NAMES
#undef ALL_NAMES

#include "mlx/backend/metal/kernels/utils.h"
