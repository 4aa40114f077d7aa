// Vector types of the Metal standard library: vec<T, N>, its swizzles, packed_* and operators.
#pragma once
#include "types.h"
#include "vec_swizzles.h"

namespace metal {

template <class T, int N> struct vec;

// A swizzle shares the storage of its W-wide vector; it reads as a vector and can be assigned to.
template <class T, int W, int... I> struct emu_swizzle {
  static constexpr int N = sizeof...(I);
  T e[W];
  emu_swizzle() = default;
  METAL_FUNC emu_swizzle& operator=(const emu_swizzle& a) { return *this = vec<T, N>(a); }
  METAL_FUNC constexpr operator vec<T, N>() const { return vec<T, N>(e[I]...); }
  METAL_FUNC emu_swizzle& operator=(const vec<T, N>& a) {
    const vec<T, N> v(a);
    int n = 0;
    ((e[I] = v.e[n++]), ...);
    return *this;
  }
  template <class B> METAL_FUNC emu_swizzle& operator+=(B b) { return *this = vec<T, N>(*this) + b; }
  template <class B> METAL_FUNC emu_swizzle& operator-=(B b) { return *this = vec<T, N>(*this) - b; }
  template <class B> METAL_FUNC emu_swizzle& operator*=(B b) { return *this = vec<T, N>(*this) * b; }
  template <class B> METAL_FUNC emu_swizzle& operator/=(B b) { return *this = vec<T, N>(*this) / b; }
};

template <class T> struct emu_width { static constexpr int value = emu_scalar_v<T> ? 1 : 0; };
template <class T, int N> struct emu_width<vec<T, N>> { static constexpr int value = N; };
template <class T, int W, int... I> struct emu_width<emu_swizzle<T, W, I...>> {
  static constexpr int value = sizeof...(I);
};

// Copies the scalars of a constructor's arguments, in order.
template <class T, class A> METAL_FUNC constexpr void emu_fill(T* e, int& n, const A& a) {
  if constexpr (emu_width<A>::value <= 1) {
    e[n++] = T(a);
  } else {
    const vec<decay_t<decltype(a.e[0])>, emu_width<A>::value> v = a;
    for (int i = 0; i < emu_width<A>::value; ++i) e[n++] = T(v.e[i]);
  }
}

#ifdef __CUDACC__
// Element by element a vector would be read from memory in pieces.
template <int Bytes> struct emu_word { using type = unsigned char; };
template <> struct emu_word<4> { using type = unsigned; };
template <> struct emu_word<8> { using type = ::uint2; };
template <> struct emu_word<16> { using type = ::uint4; };
template <class V> METAL_FUNC void emu_copy(V* to, const V* from) {
  using Word = typename emu_word<sizeof(V)>::type;
  if constexpr (sizeof(Word) == sizeof(V)) {
    *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(from);
  } else {
    for (int i = 0; i < int(sizeof(to->e) / sizeof(to->e[0])); ++i) to->e[i] = from->e[i];
  }
}
#define EMU_VEC_COPY(N)                                                                       \
  METAL_FUNC vec(const vec& a) { emu_copy(this, &a); }                                        \
  METAL_FUNC vec& operator=(const vec& a) {                                                   \
    emu_copy(this, &a);                                                                       \
    return *this;                                                                             \
  }
#else
#define EMU_VEC_COPY(N)                                                                       \
  METAL_FUNC constexpr vec(const vec& a) : e{} {                                              \
    for (int i = 0; i < N; ++i) e[i] = a.e[i];                                                \
  }                                                                                           \
  METAL_FUNC constexpr vec& operator=(const vec& a) {                                         \
    for (int i = 0; i < N; ++i) e[i] = a.e[i];                                                \
    return *this;                                                                             \
  }
#endif

#define EMU_VEC_BODY(N)                                                                       \
  vec() = default;                                                                            \
  EMU_VEC_COPY(N)                                                                             \
  template <class A, enable_if_t<is_convertible_v<A, T> && emu_width<A>::value <= 1, int> = 0>\
  METAL_FUNC constexpr vec(A a) : e{} {                                                       \
    for (int i = 0; i < N; ++i) e[i] = T(a);                                                  \
  }                                                                                           \
  template <class A, enable_if_t<!is_convertible_v<A, T> && emu_scalar_v<A>, int> = 0>        \
  METAL_FUNC explicit constexpr vec(A a) : e{} {                                              \
    for (int i = 0; i < N; ++i) e[i] = T(a);                                                  \
  }                                                                                           \
  template <class A, enable_if_t<!is_same_v<A, T>, int> = 0>                                  \
  METAL_FUNC explicit constexpr vec(const vec<A, N>& a) : e{} {                               \
    for (int i = 0; i < N; ++i) e[i] = T(a.e[i]);                                             \
  }                                                                                           \
  template <class A, class B, class... C>                                                     \
  METAL_FUNC constexpr vec(const A& a, const B& b, const C&... c) : e{} {                     \
    static_assert(emu_width<A>::value + emu_width<B>::value + (0 + ... + emu_width<C>::value) \
                      == N, "a vector constructor with the wrong number of components");      \
    int n = 0;                                                                                \
    emu_fill(e, n, a);                                                                        \
    emu_fill(e, n, b);                                                                        \
    (emu_fill(e, n, c), ...);                                                                 \
  }                                                                                           \
  METAL_FUNC constexpr T& operator[](size_t i) { return e[i]; }                               \
  METAL_FUNC constexpr const T& operator[](size_t i) const { return e[i]; }

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T e[2];
    struct { T x, y; };
    struct { T r, g; };
    EMU_SWIZZLES_2
  };
  EMU_VEC_BODY(2)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T e[3];
    struct { T x, y, z; };
    struct { T r, g, b; };
    EMU_SWIZZLES_3
  };
  EMU_VEC_BODY(3)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T e[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    EMU_SWIZZLES_4
  };
  EMU_VEC_BODY(4)
};
#undef EMU_VEC_BODY

// What an operand counts as in vector arithmetic: a vector, or a scalar to be spread.
template <class T> struct emu_vec_of { static constexpr int N = 0; };
template <class T, int M> struct emu_vec_of<vec<T, M>> {
  static constexpr int N = M;
  using elem = T;
};
template <class T, int W, int... I> struct emu_vec_of<emu_swizzle<T, W, I...>> {
  static constexpr int N = sizeof...(I);
  using elem = T;
};
template <class A, class B, bool = (emu_vec_of<A>::N > 0), bool = (emu_vec_of<B>::N > 0)>
struct emu_pair {};
template <class A, class B> struct emu_pair<A, B, true, true> {
  static constexpr int N = emu_vec_of<A>::N;
  using elem = typename emu_vec_of<A>::elem;
  using ok = enable_if_t<N == emu_vec_of<B>::N && is_same_v<elem, typename emu_vec_of<B>::elem>>;
};
template <class A, class B> struct emu_pair<A, B, true, false> {
  static constexpr int N = emu_vec_of<A>::N;
  using elem = typename emu_vec_of<A>::elem;
  using ok = enable_if_t<is_convertible_v<B, elem>>;
};
template <class A, class B> struct emu_pair<A, B, false, true> {
  static constexpr int N = emu_vec_of<B>::N;
  using elem = typename emu_vec_of<B>::elem;
  using ok = enable_if_t<is_convertible_v<A, elem>>;
};

#ifdef EMU_COUNT
// A product on its way to an addition, as emu_product is for scalars.
template <class T, int N> struct emu_vec_product : vec<T, N> {
  METAL_FUNC explicit constexpr emu_vec_product(const vec<T, N>& v) : vec<T, N>(v) {}
};
template <class T, int N> struct emu_width<emu_vec_product<T, N>> { static constexpr int value = N; };
template <class T, int N> struct emu_vec_of<emu_vec_product<T, N>> : emu_vec_of<vec<T, N>> {};
template <class T> struct emu_is_vec_product : false_type {};
template <class T, int N> struct emu_is_vec_product<emu_vec_product<T, N>> : true_type {};

template <class A, class B, class P = emu_pair<emu_bare_t<A>, emu_bare_t<B>>, class = typename P::ok>
METAL_FUNC constexpr auto operator*(A&& a, B&& b) {
  vec<typename P::elem, P::N> x(a), y(b), r{};
  for (int i = 0; i < P::N; ++i) r.e[i] = x.e[i] * y.e[i];
  return emu_vec_product<typename P::elem, P::N>(r);
}
#define EMU_VEC_SUM(op)                                                             \
  template <class A, class B, class P = emu_pair<emu_bare_t<A>, emu_bare_t<B>>,     \
            class = typename P::ok>                                                 \
  METAL_FUNC constexpr vec<typename P::elem, P::N> operator op(A&& a, B&& b) {      \
    vec<typename P::elem, P::N> x(a), y(b), r{};                                    \
    for (int i = 0; i < P::N; ++i) {                                                \
      if constexpr (emu_float_v<typename P::elem> &&                                \
                    (emu_is_vec_product<A>::value || emu_is_vec_product<B>::value)) { \
        emu_note<EMU_N_mul, -1>();                                                  \
        emu_note<EMU_N_add, -1>();                                                  \
        emu_note<EMU_N_fma>();                                                      \
      }                                                                             \
      r.e[i] = x.e[i] op y.e[i];                                                    \
    }                                                                               \
    return r;                                                                       \
  }
EMU_VEC_SUM(+) EMU_VEC_SUM(-)
#undef EMU_VEC_SUM
#endif

#define EMU_VEC_OP(op)                                                              \
  template <class A, class B, class P = emu_pair<A, B>, class = typename P::ok>     \
  METAL_FUNC constexpr vec<typename P::elem, P::N> operator op(const A& a, const B& b) { \
    vec<typename P::elem, P::N> x(a), y(b), r{};                                    \
    for (int i = 0; i < P::N; ++i) r.e[i] = x.e[i] op y.e[i];                       \
    return r;                                                                       \
  }
#ifndef EMU_COUNT
EMU_VEC_OP(+) EMU_VEC_OP(-) EMU_VEC_OP(*)
#endif
EMU_VEC_OP(/) EMU_VEC_OP(%) EMU_VEC_OP(&) EMU_VEC_OP(|) EMU_VEC_OP(^) EMU_VEC_OP(<<) EMU_VEC_OP(>>)
#undef EMU_VEC_OP
#define EMU_VEC_CMP(op)                                                             \
  template <class A, class B, class P = emu_pair<A, B>, class = typename P::ok>     \
  METAL_FUNC constexpr vec<bool, P::N> operator op(const A& a, const B& b) {        \
    vec<typename P::elem, P::N> x(a), y(b);                                         \
    vec<bool, P::N> r{};                                                            \
    for (int i = 0; i < P::N; ++i) r.e[i] = x.e[i] op y.e[i];                       \
    return r;                                                                       \
  }
EMU_VEC_CMP(<) EMU_VEC_CMP(>) EMU_VEC_CMP(<=) EMU_VEC_CMP(>=) EMU_VEC_CMP(==) EMU_VEC_CMP(!=)
EMU_VEC_CMP(&&) EMU_VEC_CMP(||)
#undef EMU_VEC_CMP
#define EMU_VEC_ASSIGN(op)                                                          \
  template <class T, int N, class B, class = typename emu_pair<vec<T, N>, decay_t<B>>::ok> \
  METAL_FUNC constexpr vec<T, N>& operator op##=(vec<T, N>& a, B&& b) {             \
    return a = vec<T, N>(a op static_cast<B&&>(b));                                 \
  }
EMU_VEC_ASSIGN(+) EMU_VEC_ASSIGN(-) EMU_VEC_ASSIGN(*) EMU_VEC_ASSIGN(/) EMU_VEC_ASSIGN(%)
EMU_VEC_ASSIGN(&) EMU_VEC_ASSIGN(|) EMU_VEC_ASSIGN(^) EMU_VEC_ASSIGN(<<) EMU_VEC_ASSIGN(>>)
#undef EMU_VEC_ASSIGN
#define EMU_VEC_UNARY(op, R)                                                        \
  template <class T, int N> METAL_FUNC constexpr vec<R, N> operator op(const vec<T, N>& a) { \
    vec<R, N> r{};                                                                  \
    for (int i = 0; i < N; ++i) r.e[i] = op a.e[i];                                 \
    return r;                                                                       \
  }
EMU_VEC_UNARY(-, T) EMU_VEC_UNARY(~, T) EMU_VEC_UNARY(!, bool)
#undef EMU_VEC_UNARY

// Packed vectors have the alignment of one element; they are converted to compute with.
template <class T, int N> struct packed_vec {
  T e[N];
  packed_vec() = default;
  METAL_FUNC constexpr packed_vec(const vec<T, N>& v) : e{} {
    for (int i = 0; i < N; ++i) e[i] = v.e[i];
  }
  METAL_FUNC constexpr operator vec<T, N>() const {
    vec<T, N> v{};
    for (int i = 0; i < N; ++i) v.e[i] = e[i];
    return v;
  }
  METAL_FUNC constexpr T& operator[](size_t i) { return e[i]; }
  METAL_FUNC constexpr const T& operator[](size_t i) const { return e[i]; }
};

}  // namespace metal

#define EMU_VEC_NAMES(T, name)                                                      \
  using name##2 = metal::vec<T, 2>;                                                 \
  using name##3 = metal::vec<T, 3>;                                                 \
  using name##4 = metal::vec<T, 4>;                                                 \
  using packed_##name##2 = metal::packed_vec<T, 2>;                                 \
  using packed_##name##3 = metal::packed_vec<T, 3>;                                 \
  using packed_##name##4 = metal::packed_vec<T, 4>;
#define EMU_ALL_VEC_NAMES                                                           \
  EMU_VEC_NAMES(bool, bool) EMU_VEC_NAMES(char, char) EMU_VEC_NAMES(uchar, uchar)   \
  EMU_VEC_NAMES(short, short) EMU_VEC_NAMES(ushort, ushort) EMU_VEC_NAMES(int, int) \
  EMU_VEC_NAMES(uint, uint) EMU_VEC_NAMES(long, long) EMU_VEC_NAMES(ulong, ulong)   \
  EMU_VEC_NAMES(half, half) EMU_VEC_NAMES(bfloat, bfloat) EMU_VEC_NAMES(emu_float, float)
EMU_ALL_VEC_NAMES
namespace metal { EMU_ALL_VEC_NAMES }
