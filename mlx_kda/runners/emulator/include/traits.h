// Type traits of the Metal standard library, which has no <type_traits>.
#pragma once

#ifdef __CUDACC__
#define EMU_DECLARED __device__
#else
#define METAL_FUNC inline __attribute__((always_inline))
#define EMU_DECLARED
#endif
#define __METAL__ 1
#define __METAL_VERSION__ 320
#define __HAVE_BFLOAT__ 1

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f

namespace metal {

template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  METAL_FUNC constexpr operator T() const { return v; }
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
template <class T> struct is_pointer : false_type {};
template <class T> struct is_pointer<T*> : true_type {};
template <class T> constexpr bool is_pointer_v = is_pointer<T>::value;
template <class...> struct emu_void { using type = void; };
template <class... T> using emu_void_t = typename emu_void<T...>::type;
template <class T> EMU_DECLARED remove_reference_t<T>&& declval();
template <class T> EMU_DECLARED void emu_accept(T);
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

template <class T> struct emu_is_int : false_type {};
#define EMU_INT(T) template <> struct emu_is_int<T> : true_type {};
EMU_INT(bool) EMU_INT(char) EMU_INT(signed char) EMU_INT(uchar) EMU_INT(short) EMU_INT(ushort)
EMU_INT(int) EMU_INT(uint) EMU_INT(long) EMU_INT(ulong) EMU_INT(long long)
EMU_INT(unsigned long long)
#undef EMU_INT
template <class T> constexpr bool emu_int_v = emu_is_int<remove_cv_t<T>>::value;

}  // namespace metal
