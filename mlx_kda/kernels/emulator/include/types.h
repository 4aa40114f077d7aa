// Scalar types, type traits, casts and limits of the Metal standard library for a host compiler.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL__ 1
#define __METAL_VERSION__ 320
#define __HAVE_BFLOAT__ 1

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#ifdef EMU_COUNT
#include "counted.h"  // emu_float and half: the same values, every operation counted
#else
typedef float emu_float;
typedef _Float16 half;
#endif

namespace metal {

template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  constexpr operator T() const { return v; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool B> using bool_constant = integral_constant<bool, B>;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class U> struct conditional { using type = T; };
template <class T, class U> struct conditional<false, T, U> { using type = U; };
template <bool B, class T, class U> using conditional_t = typename conditional<B, T, U>::type;
template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T> using remove_volatile_t = typename remove_volatile<T>::type;
template <class T> struct remove_cv { using type = remove_volatile_t<remove_const_t<T>>; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> struct remove_pointer { using type = T; };
template <class T> struct remove_pointer<T*> { using type = T; };
template <class T> using remove_pointer_t = typename remove_pointer<T>::type;
template <class T> struct decay { using type = remove_cv_t<remove_reference_t<T>>; };
template <class T> using decay_t = typename decay<T>::type;
template <class T> struct remove_addrspace { using type = T; };  // one address space here
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T> struct is_pointer : false_type {};
template <class T> struct is_pointer<T*> : true_type {};
template <class T> constexpr bool is_pointer_v = is_pointer<T>::value;
template <class...> struct emu_void { using type = void; };
template <class... T> using emu_void_t = typename emu_void<T...>::type;
template <class T> remove_reference_t<T>&& declval();
template <class T> void emu_accept(T);
template <class A, class B, class = void> struct is_convertible : false_type {};
template <class A, class B>
struct is_convertible<A, B, emu_void_t<decltype(emu_accept<B>(declval<A>()))>> : true_type {};
template <class A, class B> constexpr bool is_convertible_v = is_convertible<A, B>::value;
template <class...> struct _disjunction : false_type {};
template <class B, class... R>
struct _disjunction<B, R...> : conditional_t<bool(B::value), B, _disjunction<R...>> {};
template <class...> struct _conjunction : true_type {};
template <class B, class... R>
struct _conjunction<B, R...> : conditional_t<bool(B::value), _conjunction<R...>, B> {};
template <class... B> using disjunction = _disjunction<B...>;
template <class... B> using conjunction = _conjunction<B...>;

template <class To, class From> METAL_FUNC constexpr To emu_bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
  if constexpr (__is_trivially_copyable(To) && __is_trivially_copyable(From)) {
    return __builtin_bit_cast(To, from);
  } else {
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
  }
}

template <class T> struct emu_is_int : false_type {};
#define EMU_INT(T) template <> struct emu_is_int<T> : true_type {};
EMU_INT(bool) EMU_INT(char) EMU_INT(signed char) EMU_INT(uchar) EMU_INT(short) EMU_INT(ushort)
EMU_INT(int) EMU_INT(uint) EMU_INT(long) EMU_INT(ulong) EMU_INT(long long)
EMU_INT(unsigned long long)
#undef EMU_INT
template <class T> constexpr bool emu_int_v = emu_is_int<remove_cv_t<T>>::value;

// bfloat widens to float by itself; float and half are narrowed to it only by an explicit cast.
constexpr uint16_t emu_bfloat_bits(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);  // keep NaN a NaN
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class T, enable_if_t<emu_int_v<T>, int> = 0>
  METAL_FUNC constexpr bfloat(T x) : bits(emu_bfloat_bits(float(x))) {}
  template <class T, enable_if_t<!emu_int_v<T> && is_convertible_v<T, emu_float>, int> = 0>
  METAL_FUNC explicit constexpr bfloat(T x) : bits(emu_bfloat_bits(emu_narrow(emu_float(x)))) {}
  METAL_FUNC constexpr operator emu_float() const {
    return emu_widen(__builtin_bit_cast(float, uint32_t(bits) << 16));
  }
  static constexpr bfloat from_bits(uint16_t b) { return __builtin_bit_cast(bfloat, b); }
#ifdef EMU_COUNT
  static constexpr emu_float emu_widen(float x) { return emu_counted_convert(x); }
  static constexpr float emu_narrow(emu_float x) { return emu_counted_convert(x).v; }
#else
  static constexpr float emu_widen(float x) { return x; }
  static constexpr float emu_narrow(float x) { return x; }
#endif
#define EMU_BF_ASSIGN(op)                                                  \
  template <class T> METAL_FUNC bfloat& operator op##=(T y) {              \
    return *this = bfloat(emu_float(*this) op emu_float(y));               \
  }
  EMU_BF_ASSIGN(+) EMU_BF_ASSIGN(-) EMU_BF_ASSIGN(*) EMU_BF_ASSIGN(/)
#undef EMU_BF_ASSIGN
};

template <class T> constexpr bool emu_float_v =
    is_same_v<remove_cv_t<T>, emu_float> || is_same_v<remove_cv_t<T>, half> ||
    is_same_v<remove_cv_t<T>, bfloat>;
template <class T> constexpr bool emu_scalar_v = emu_int_v<T> || emu_float_v<T>;

#define EMU_BF_OP(op)                                                                          \
  METAL_FUNC constexpr bfloat operator op(bfloat a, bfloat b) {                                \
    return bfloat(emu_float(a) op emu_float(b));                                               \
  }                                                                                            \
  template <class I, enable_if_t<emu_int_v<I>, int> = 0>                                       \
  METAL_FUNC constexpr bfloat operator op(bfloat a, I b) {                                     \
    return bfloat(emu_float(a) op emu_float(b));                                               \
  }                                                                                            \
  template <class I, enable_if_t<emu_int_v<I>, int> = 0>                                       \
  METAL_FUNC constexpr bfloat operator op(I a, bfloat b) {                                     \
    return bfloat(emu_float(a) op emu_float(b));                                               \
  }
EMU_BF_OP(+) EMU_BF_OP(-) EMU_BF_OP(*) EMU_BF_OP(/)
#undef EMU_BF_OP
METAL_FUNC constexpr bfloat operator-(bfloat a) { return bfloat::from_bits(a.bits ^ 0x8000u); }
#define EMU_BF_CMP(op)                                                                         \
  METAL_FUNC constexpr bool operator op(bfloat a, bfloat b) {                                  \
    return emu_float(a) op emu_float(b);                                                       \
  }
EMU_BF_CMP(<) EMU_BF_CMP(>) EMU_BF_CMP(<=) EMU_BF_CMP(>=) EMU_BF_CMP(==) EMU_BF_CMP(!=)
#undef EMU_BF_CMP

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
  static constexpr T max() { return is_signed ? T(((1ull << (digits - 1)) - 1) * 2 + 1) : T(~T(0)); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
};
#define EMU_LIMITS(T, MAX, MIN, INF, NAN_, EPS, DENORM)           \
  template <> struct numeric_limits<T> {                          \
    static constexpr bool is_integer = false;                     \
    static constexpr bool is_signed = true;                       \
    static constexpr T max() { return MAX; }                      \
    static constexpr T min() { return MIN; }                      \
    static constexpr T lowest() { return -MAX; }                  \
    static constexpr T infinity() { return INF; }                 \
    static constexpr T quiet_NaN() { return NAN_; }               \
    static constexpr T epsilon() { return EPS; }                  \
    static constexpr T denorm_min() { return DENORM; }            \
  };
EMU_LIMITS(emu_float, emu_float(__FLT_MAX__), emu_float(__FLT_MIN__), emu_float(__builtin_inff()),
           emu_float(__builtin_nanf("")), emu_float(__FLT_EPSILON__),
           emu_float(__FLT_DENORM_MIN__))
EMU_LIMITS(half, half(65504.f), half(6.103515625e-5f), half(__builtin_inff()),
           half(__builtin_nanf("")), half(9.765625e-4f), half(5.9604644775390625e-8f))
EMU_LIMITS(bfloat, bfloat::from_bits(0x7f7f), bfloat::from_bits(0x0080), bfloat::from_bits(0x7f80),
           bfloat::from_bits(0x7fc0), bfloat::from_bits(0x3c00), bfloat::from_bits(0x0001))
#undef EMU_LIMITS

// A value that is the same in every thread, by the promise of who wrote it.
template <class T> struct uniform {
  T emu_value;
  constexpr uniform(T x) : emu_value(x) {}
  constexpr operator T() const { return emu_value; }
};
template <class T> constexpr uniform<T> make_uniform(T x) { return uniform<T>{x}; }

template <class T, size_t N> struct array {
  T emu_elements[N];
  constexpr T& operator[](size_t i) { return emu_elements[i]; }
  constexpr const T& operator[](size_t i) const { return emu_elements[i]; }
  constexpr size_t size() const { return N; }
};

}  // namespace metal

using metal::bfloat;
template <class To, class From> METAL_FUNC constexpr To as_type(From from) {
  return metal::emu_bit_cast<To>(from);
}
