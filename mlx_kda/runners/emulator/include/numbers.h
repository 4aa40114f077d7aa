// Traits and limits of numbers, once emu_float, half and bfloat are known.
#pragma once
#include "traits.h"

namespace metal {

template <class T> constexpr bool emu_float_v =
    is_same_v<remove_cv_t<T>, emu_float> || is_same_v<remove_cv_t<T>, half> ||
    is_same_v<remove_cv_t<T>, bfloat>;
template <class T> constexpr bool emu_scalar_v = emu_int_v<T> || emu_float_v<T>;
template <class T> struct is_floating_point : bool_constant<emu_float_v<T>> {};
template <class T> struct is_integral : bool_constant<emu_int_v<T>> {};
template <class T> struct is_arithmetic : bool_constant<emu_scalar_v<T>> {};
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> constexpr bool is_integral_v = is_integral<T>::value;
template <class T> constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T> struct is_signed : bool_constant<emu_scalar_v<T> && T(-1) < T(0)> {};
template <class T> struct is_unsigned : bool_constant<emu_int_v<T> && !(T(-1) < T(0))> {};
template <class T> constexpr bool is_signed_v = is_signed<T>::value;
template <class T> constexpr bool is_unsigned_v = is_unsigned<T>::value;
template <class T> struct make_unsigned { using type = T; };
template <class T> struct make_signed { using type = T; };
#define EMU_SIGNS(S, U)                                     \
  template <> struct make_unsigned<S> { using type = U; };  \
  template <> struct make_signed<U> { using type = S; };
EMU_SIGNS(signed char, uchar) EMU_SIGNS(short, ushort) EMU_SIGNS(int, uint) EMU_SIGNS(long, ulong)
#undef EMU_SIGNS
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> using make_signed_t = typename make_signed<T>::type;

template <class T> struct numeric_limits {
  static constexpr bool is_integer = emu_int_v<T>;
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr int digits = int(sizeof(T) * 8) - is_signed;
  METAL_FUNC static constexpr T max() {
    return is_signed ? T(((1ull << (digits - 1)) - 1) * 2 + 1) : T(~T(0));
  }
  METAL_FUNC static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  METAL_FUNC static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<bool> {
  METAL_FUNC static constexpr bool max() { return true; }
  METAL_FUNC static constexpr bool min() { return false; }
};
#define EMU_LIMITS(T, MAX, MIN, INF, NAN_, EPS, DENORM)           \
  template <> struct numeric_limits<T> {                          \
    static constexpr bool is_integer = false;                     \
    static constexpr bool is_signed = true;                       \
    METAL_FUNC static constexpr T max() { return MAX; }           \
    METAL_FUNC static constexpr T min() { return MIN; }           \
    METAL_FUNC static constexpr T lowest() { return -MAX; }       \
    METAL_FUNC static constexpr T infinity() { return INF; }      \
    METAL_FUNC static constexpr T quiet_NaN() { return NAN_; }    \
    METAL_FUNC static constexpr T epsilon() { return EPS; }       \
    METAL_FUNC static constexpr T denorm_min() { return DENORM; } \
  };
EMU_LIMITS(emu_float, emu_float(__FLT_MAX__), emu_float(__FLT_MIN__), emu_float(__builtin_inff()),
           emu_float(__builtin_nanf("")), emu_float(__FLT_EPSILON__),
           emu_float(__FLT_DENORM_MIN__))
EMU_LIMITS(half, half(65504.f), half(6.103515625e-5f), half(__builtin_inff()),
           half(__builtin_nanf("")), half(9.765625e-4f), half(5.9604644775390625e-8f))
EMU_LIMITS(bfloat, bfloat(0x1.fep127f), bfloat(__FLT_MIN__), bfloat(__builtin_inff()),
           bfloat(__builtin_nanf("")), bfloat(0.0078125f), bfloat(0x1p-133f))
#undef EMU_LIMITS

// A value that is the same in every thread, by the promise of who wrote it.
template <class T> struct uniform {
  T emu_value;
  METAL_FUNC constexpr uniform(T x) : emu_value(x) {}
  METAL_FUNC constexpr operator T() const { return emu_value; }
};
template <class T> METAL_FUNC constexpr uniform<T> make_uniform(T x) { return uniform<T>{x}; }

template <class T, size_t N> struct array {
  T emu_elements[N];
  METAL_FUNC constexpr T& operator[](size_t i) { return emu_elements[i]; }
  METAL_FUNC constexpr const T& operator[](size_t i) const { return emu_elements[i]; }
  METAL_FUNC constexpr size_t size() const { return N; }
};

}  // namespace metal
