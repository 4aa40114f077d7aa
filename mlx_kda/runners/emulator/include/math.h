// The math, relational, integer and geometric functions of the Metal standard library.
#pragma once
#include "vec.h"

#ifndef EMU_COUNT
#define EMU_NOTE(what)
#endif

namespace metal {

// The type an argument computes in: half and bfloat compute in float and round once.
template <class T> struct emu_value { using type = T; };
template <class T> using emu_value_t = typename emu_value<T>::type;
#ifdef EMU_COUNT
template <> struct emu_value<float> { using type = emu_float; };  // a literal
template <> struct emu_value<emu_product> { using type = emu_float; };
METAL_FUNC constexpr float emu_raw(emu_float x) { return x.v; }
METAL_FUNC constexpr float emu_raw(half x) { return x.raw(); }
#else
METAL_FUNC constexpr float emu_raw(half x) { return x; }
#endif
METAL_FUNC constexpr float emu_raw(float x) { return x; }
METAL_FUNC constexpr float emu_raw(bfloat x) {
  return __builtin_bit_cast(float, uint32_t(x.bits) << 16);
}
template <class T> METAL_FUNC constexpr T emu_from_raw(float x) {
  if constexpr (is_same_v<T, bfloat>) return bfloat::from_bits(emu_bfloat_bits(x));
#ifdef EMU_COUNT
  else if constexpr (is_same_v<T, half>) return half::from_raw(x);
#endif
  else return T(x);
}
template <class T> constexpr bool emu_arg_v = emu_float_v<emu_value_t<T>>;

#define EMU_MATH1(name, kind, expr)                                                       \
  template <class T, enable_if_t<emu_arg_v<T>, int> = 0>                                  \
  METAL_FUNC emu_value_t<T> name(T a) {                                                   \
    EMU_NOTE(kind);                                                                       \
    const float x = emu_raw(a);                                                           \
    return emu_from_raw<emu_value_t<T>>(expr);                                            \
  }                                                                                       \
  template <class T, int N> METAL_FUNC vec<T, N> name(vec<T, N> a) {                      \
    vec<T, N> r;                                                                          \
    for (int i = 0; i < N; ++i) r.e[i] = name(a.e[i]);                                    \
    return r;                                                                             \
  }
#define EMU_MATH2(name, kind, expr)                                                       \
  template <class T, class U,                                                             \
            enable_if_t<emu_arg_v<T> && is_same_v<emu_value_t<T>, emu_value_t<U>>, int> = 0> \
  METAL_FUNC emu_value_t<T> name(T a, U b) {                                              \
    EMU_NOTE(kind);                                                                       \
    const float x = emu_raw(a), y = emu_raw(b);                                           \
    return emu_from_raw<emu_value_t<T>>(expr);                                            \
  }                                                                                       \
  template <class T, int N> METAL_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b) {         \
    vec<T, N> r;                                                                          \
    for (int i = 0; i < N; ++i) r.e[i] = name(a.e[i], b.e[i]);                            \
    return r;                                                                             \
  }

#define EMU_MATH_FUNCTIONS                                                                \
  EMU_MATH1(exp, special, __builtin_expf(x))                                              \
  EMU_MATH1(exp2, special, __builtin_exp2f(x))                                            \
  EMU_MATH1(exp10, special, __builtin_exp2f(x * 3.321928094887362f))                      \
  EMU_MATH1(log, special, __builtin_logf(x))                                              \
  EMU_MATH1(log2, special, __builtin_log2f(x))                                            \
  EMU_MATH1(log10, special, __builtin_log10f(x))                                          \
  EMU_MATH1(sin, special, __builtin_sinf(x))                                              \
  EMU_MATH1(cos, special, __builtin_cosf(x))                                              \
  EMU_MATH1(tan, special, __builtin_tanf(x))                                              \
  EMU_MATH1(sinpi, special, __builtin_sinf(x * 3.14159265358979f))                        \
  EMU_MATH1(cospi, special, __builtin_cosf(x * 3.14159265358979f))                        \
  EMU_MATH1(asin, special, __builtin_asinf(x))                                            \
  EMU_MATH1(acos, special, __builtin_acosf(x))                                            \
  EMU_MATH1(atan, special, __builtin_atanf(x))                                            \
  EMU_MATH1(sinh, special, __builtin_sinhf(x))                                            \
  EMU_MATH1(cosh, special, __builtin_coshf(x))                                            \
  EMU_MATH1(tanh, special, __builtin_tanhf(x))                                            \
  EMU_MATH1(asinh, special, __builtin_asinhf(x))                                          \
  EMU_MATH1(acosh, special, __builtin_acoshf(x))                                          \
  EMU_MATH1(atanh, special, __builtin_atanhf(x))                                          \
  EMU_MATH1(sqrt, special, __builtin_sqrtf(x))                                            \
  EMU_MATH1(rsqrt, special, 1.0f / __builtin_sqrtf(x))                                    \
  EMU_MATH1(floor, minmax, __builtin_floorf(x))                                           \
  EMU_MATH1(ceil, minmax, __builtin_ceilf(x))                                             \
  EMU_MATH1(round, minmax, __builtin_roundf(x))                                           \
  EMU_MATH1(rint, minmax, __builtin_rintf(x))                                             \
  EMU_MATH1(trunc, minmax, __builtin_truncf(x))                                           \
  EMU_MATH1(fract, minmax, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))      \
  EMU_MATH1(fabs, none, __builtin_fabsf(x))                                               \
  EMU_MATH2(fmin, minmax, __builtin_fminf(x, y))                                          \
  EMU_MATH2(fmax, minmax, __builtin_fmaxf(x, y))                                          \
  EMU_MATH2(fmod, special, __builtin_fmodf(x, y))                                         \
  EMU_MATH2(fdim, minmax, __builtin_fdimf(x, y))                                          \
  EMU_MATH2(pow, special, __builtin_powf(x, y))                                           \
  EMU_MATH2(powr, special, __builtin_powf(x, y))                                          \
  EMU_MATH2(atan2, special, __builtin_atan2f(x, y))                                       \
  EMU_MATH2(divide, division, x / y)

EMU_MATH_FUNCTIONS
namespace fast { EMU_MATH_FUNCTIONS }
namespace precise { EMU_MATH_FUNCTIONS }
EMU_MATH2(copysign, none, __builtin_copysignf(x, y))
EMU_MATH2(nextafter, none, __builtin_nextafterf(x, y))
EMU_MATH1(sign, minmax, x > 0 ? 1.f : x < 0 ? -1.f : x)
EMU_MATH1(saturate, minmax, __builtin_fminf(__builtin_fmaxf(x, 0.f), 1.f))
#undef EMU_MATH_FUNCTIONS

template <class T, enable_if_t<emu_arg_v<T>, int> = 0>
METAL_FUNC emu_value_t<T> fma(T a, T b, T c) {
  EMU_NOTE(fma);
  return emu_from_raw<emu_value_t<T>>(__builtin_fmaf(emu_raw(a), emu_raw(b), emu_raw(c)));
}
#ifdef EMU_COUNT
METAL_FUNC emu_float fma(emu_float a, emu_float b, emu_float c) {
  EMU_NOTE(fma);
  return __builtin_fmaf(a.v, b.v, c.v);
}
#endif
template <class T, int N> METAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.e[i] = fma(a.e[i], b.e[i], c.e[i]);
  return r;
}

// min, max and clamp take operands of one type, as Metal's overloads do.
#define EMU_MINMAX(name, op)                                                              \
  template <class T, class U,                                                             \
            enable_if_t<emu_scalar_v<emu_value_t<T>> &&                                   \
                        is_same_v<emu_value_t<T>, emu_value_t<U>>, int> = 0>              \
  METAL_FUNC constexpr emu_value_t<T> name(T a, U b) {                                    \
    if constexpr (emu_arg_v<T>) return f##name(a, b);                                     \
    else return a op b ? a : b;                                                           \
  }                                                                                       \
  template <class T, int N> METAL_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b) {         \
    vec<T, N> r;                                                                          \
    for (int i = 0; i < N; ++i) r.e[i] = name(a.e[i], b.e[i]);                            \
    return r;                                                                             \
  }                                                                                       \
  template <class T, int N> METAL_FUNC vec<T, N> name(vec<T, N> a, T b) {                 \
    return name(a, vec<T, N>(b));                                                         \
  }                                                                                       \
  template <class T> METAL_FUNC T name##3(T a, T b, T c) { return name(name(a, b), c); }
EMU_MINMAX(min, <)
EMU_MINMAX(max, >)
#undef EMU_MINMAX
template <class T> METAL_FUNC emu_value_t<T> clamp(T x, emu_value_t<T> lo, emu_value_t<T> hi) {
  return min(max(emu_value_t<T>(x), lo), hi);
}
template <class T, int N> METAL_FUNC vec<T, N> clamp(vec<T, N> x, T lo, T hi) {
  return min(max(x, vec<T, N>(lo)), vec<T, N>(hi));
}
template <class T, enable_if_t<emu_arg_v<T>, int> = 0> METAL_FUNC emu_value_t<T> abs(T x) {
  return fabs(x);
}
template <class T, enable_if_t<emu_int_v<T>, int> = 0> METAL_FUNC T abs(T x) {
  return x < T(0) ? T(-x) : x;
}
template <class T, int N> METAL_FUNC vec<T, N> abs(vec<T, N> a) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.e[i] = abs(a.e[i]);
  return r;
}
template <class T> METAL_FUNC T mix(T x, T y, T a) { return x + (y - x) * a; }
template <class T> METAL_FUNC T step(T edge, T x) { return x < edge ? T(0) : T(1); }
template <class T> METAL_FUNC T smoothstep(T a, T b, T x) {
  T t = clamp((x - a) / (b - a), T(0), T(1));
  return t * t * (T(3) - T(2) * t);
}
template <class T, enable_if_t<emu_arg_v<T>, int> = 0> METAL_FUNC T ldexp(T x, int k) {
  return emu_from_raw<T>(__builtin_ldexpf(emu_raw(x), k));
}
template <class T, enable_if_t<emu_arg_v<T>, int> = 0> METAL_FUNC T frexp(T x, int& k) {
  return emu_from_raw<T>(__builtin_frexpf(emu_raw(x), &k));
}
template <class T, enable_if_t<emu_arg_v<T>, int> = 0> METAL_FUNC T modf(T x, T& whole) {
  whole = emu_from_raw<T>(__builtin_truncf(emu_raw(x)));
  return emu_from_raw<T>(emu_raw(x) - emu_raw(whole));
}
template <class T> METAL_FUNC T sincos(T x, T& c) {
  c = cos(x);
  return sin(x);
}

// ---- relational ----
#define EMU_TEST(name, expr)                                                              \
  template <class T, enable_if_t<emu_arg_v<T>, int> = 0> METAL_FUNC bool name(T a) {      \
    const float x = emu_raw(a);                                                           \
    return expr;                                                                          \
  }                                                                                       \
  template <class T, int N> METAL_FUNC vec<bool, N> name(vec<T, N> a) {                   \
    vec<bool, N> r;                                                                       \
    for (int i = 0; i < N; ++i) r.e[i] = name(a.e[i]);                                    \
    return r;                                                                             \
  }
EMU_TEST(isnan, __builtin_isnan(x))
EMU_TEST(isinf, __builtin_isinf(x))
EMU_TEST(isfinite, __builtin_isfinite(x))
EMU_TEST(isnormal, __builtin_isnormal(x))
EMU_TEST(signbit, __builtin_signbit(x))
#undef EMU_TEST
template <class T, enable_if_t<emu_scalar_v<emu_value_t<T>>, int> = 0>
METAL_FUNC emu_value_t<T> select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N> METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.e[i] = c.e[i] ? b.e[i] : a.e[i];
  return r;
}
METAL_FUNC bool all(bool x) { return x; }
METAL_FUNC bool any(bool x) { return x; }
template <int N> METAL_FUNC bool all(vec<bool, N> a) {
  bool r = true;
  for (int i = 0; i < N; ++i) r = r && a.e[i];
  return r;
}
template <int N> METAL_FUNC bool any(vec<bool, N> a) {
  bool r = false;
  for (int i = 0; i < N; ++i) r = r || a.e[i];
  return r;
}

// ---- geometric ----
template <class T, int N> METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T r = a.e[0] * b.e[0];
  for (int i = 1; i < N; ++i) r = r + a.e[i] * b.e[i];
  return r;
}
template <class T, int N> METAL_FUNC T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> METAL_FUNC T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T, int N> METAL_FUNC T distance(vec<T, N> a, vec<T, N> b) { return length(a - b); }
template <class T, int N> METAL_FUNC vec<T, N> normalize(vec<T, N> a) {
  return a * rsqrt(dot(a, a));
}
template <class T> METAL_FUNC vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return vec<T, 3>(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x);
}

// ---- integer ----
template <class T> using emu_only_int = enable_if_t<emu_int_v<T>, int>;
template <class T, emu_only_int<T> = 0> METAL_FUNC T popcount(T x) {
  return T(__builtin_popcountll((unsigned long long)make_unsigned_t<T>(x)));
}
template <class T, emu_only_int<T> = 0> METAL_FUNC T clz(T x) {
  const auto u = make_unsigned_t<T>(x);
  return u ? T(__builtin_clzll((unsigned long long)u) - (64 - 8 * int(sizeof(T))))
           : T(8 * sizeof(T));
}
template <class T, emu_only_int<T> = 0> METAL_FUNC T ctz(T x) {
  return x ? T(__builtin_ctzll((unsigned long long)x)) : T(8 * sizeof(T));
}
template <class T, enable_if_t<emu_int_v<T> && sizeof(T) <= 4, int> = 0>
METAL_FUNC T mulhi(T a, T b) {
  return T(((long long)a * (long long)b) >> (8 * sizeof(T)));
}
template <class T, emu_only_int<T> = 0> METAL_FUNC T rotate(T v, T by) {
  constexpr int W = 8 * sizeof(T);
  const auto u = make_unsigned_t<T>(v);
  const int k = int(by) & (W - 1);
  return k ? T((u << k) | (u >> (W - k))) : v;
}
template <class T, emu_only_int<T> = 0> METAL_FUNC T reverse_bits(T v) {
  auto u = make_unsigned_t<T>(v);
  make_unsigned_t<T> r = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i, u >>= 1) r = make_unsigned_t<T>((r << 1) | (u & 1));
  return T(r);
}
template <class T, emu_only_int<T> = 0> METAL_FUNC T extract_bits(T v, uint offset, uint bits) {
  if (bits == 0) return 0;
  const uint W = 8 * sizeof(T);
  return T(T(make_unsigned_t<T>(v) << (W - bits - offset)) >> (W - bits));
}
template <class T, emu_only_int<T> = 0>
METAL_FUNC make_unsigned_t<T> absdiff(T a, T b) {
  return a > b ? make_unsigned_t<T>(a) - make_unsigned_t<T>(b)
               : make_unsigned_t<T>(b) - make_unsigned_t<T>(a);
}
template <class T, emu_only_int<T> = 0> METAL_FUNC T addsat(T a, T b) {
  T r;
  if (!__builtin_add_overflow(a, b, &r)) return r;
  return b < T(0) ? numeric_limits<T>::min() : numeric_limits<T>::max();
}
template <class T, emu_only_int<T> = 0> METAL_FUNC T subsat(T a, T b) {
  T r;
  if (!__builtin_sub_overflow(a, b, &r)) return r;
  return b > T(0) ? numeric_limits<T>::min() : numeric_limits<T>::max();
}

}  // namespace metal
