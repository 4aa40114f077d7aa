// float and half for the counting build: the same values, and every operation noted.
//
// What is counted is the arithmetic as the source writes it; a product that is added to something
// in the same expression is one fused multiply-add, as Metal's compiler contracts it. Sign changes
// and absolute values are free, integer arithmetic (addresses, loops) is not counted.
#pragma once
#include "runtime.h"

namespace metal {

// Notes must not look like memory accesses to the optimiser, or it would load again what a thread
// already has in registers.
template <int which, int by = 1> inline __attribute__((always_inline)) void emu_note_now() {
#if defined(__x86_64__) && !defined(__APPLE__)
  asm volatile("addq %1, emu_counts+%c0(%%rip)" : : "i"(8 * which), "i"(by) : "cc");
#else
  emu_counts[which] += by;
#endif
}
template <int which, int by = 1> inline __attribute__((always_inline)) constexpr void emu_note() {
  if constexpr (which < EMU_N_COUNTERS)
    if (!__builtin_is_constant_evaluated()) emu_note_now<which, by>();
}
#define EMU_NOTE(what) metal::emu_note<EMU_N_##what>()

struct emu_float;
struct emu_product;
struct bfloat;
struct emu_half;

template <class T> struct emu_bare { using type = T; };
template <class T> struct emu_bare<T&> { using type = typename emu_bare<T>::type; };
template <class T> struct emu_bare<T&&> { using type = typename emu_bare<T>::type; };
template <class T> struct emu_bare<const T> { using type = T; };
template <class T> using emu_bare_t = typename emu_bare<T>::type;

// Ranks: 0 nothing to do with us, 1 integer, 2 float literal, 3 bfloat, 4 half, 5 counted float.
template <class T> constexpr int emu_rank = emu_int_v<T> ? 1 : 0;
template <> constexpr int emu_rank<float> = 2;
template <> constexpr int emu_rank<bfloat> = 3;
template <> constexpr int emu_rank<emu_half> = 4;
template <> constexpr int emu_rank<emu_float> = 5;
template <> constexpr int emu_rank<emu_product> = 5;
template <class L, class R> constexpr bool emu_to_float =
    emu_rank<L> && emu_rank<R> &&
    (emu_rank<L> == 5 || emu_rank<R> == 5 || (emu_rank<L> >= 3 && emu_rank<R> == 2) ||
     (emu_rank<R> >= 3 && emu_rank<L> == 2));
template <class L, class R> constexpr bool emu_to_half =
    (emu_rank<L> == 4 && (emu_rank<R> == 4 || emu_rank<R> == 1)) ||
    (emu_rank<R> == 4 && emu_rank<L> == 1);

struct emu_float {
  float v;
  emu_float() = default;
  METAL_FUNC constexpr emu_float(float x) : v(x) {}
  template <class I, enable_if_t<emu_int_v<I>, int> = 0>
  METAL_FUNC constexpr emu_float(I x) : v(float(x)) {}
  template <class B, enable_if_t<is_same_v<B, bfloat>, char> = 0>
  METAL_FUNC constexpr emu_float(B x) : v(float(x)) {}
  template <class I, enable_if_t<emu_int_v<I> && !is_same_v<I, bool>, int> = 0>
  METAL_FUNC explicit constexpr operator I() const { return I(v); }
  METAL_FUNC explicit constexpr operator bool() const { return v != 0; }
  METAL_FUNC constexpr emu_float operator-() const { return emu_float(-v); }
  METAL_FUNC constexpr emu_float operator+() const { return *this; }
#define EMU_ASSIGN(op) template <class R> METAL_FUNC constexpr emu_float& operator op##=(R&& r);
  EMU_ASSIGN(+) EMU_ASSIGN(-) EMU_ASSIGN(*) EMU_ASSIGN(/)
#undef EMU_ASSIGN
};
struct emu_product : emu_float {  // a product on its way to an addition, perhaps
  template <class N, enable_if_t<emu_int_v<N> || is_same_v<N, float>, int> = 0>
  METAL_FUNC constexpr emu_product(N x) : emu_float(x) {}
};

struct emu_half {
  _Float16 h;
  emu_half() = default;
  METAL_FUNC constexpr emu_half(float x) : h(_Float16(x)) {}
  METAL_FUNC explicit constexpr emu_half(emu_float x) : h(_Float16(x.v)) {}
  template <class I, enable_if_t<emu_int_v<I>, int> = 0>
  METAL_FUNC constexpr emu_half(I x) : h(_Float16(x)) {}
  template <class I, enable_if_t<emu_int_v<I> && !is_same_v<I, bool>, int> = 0>
  METAL_FUNC explicit constexpr operator I() const { return I(h); }
  METAL_FUNC explicit constexpr operator bool() const { return h != 0; }
  METAL_FUNC constexpr operator emu_float() const { return emu_float(float(h)); }
  METAL_FUNC constexpr emu_half operator-() const { return emu_half(float(-h)); }
  METAL_FUNC constexpr float raw() const { return float(h); }
  METAL_FUNC static constexpr emu_half from_raw(float x) { return emu_half(x); }
#define EMU_ASSIGN(op)                                             \
  template <class R> METAL_FUNC emu_half& operator op##=(R&& r);
  EMU_ASSIGN(+) EMU_ASSIGN(-) EMU_ASSIGN(*) EMU_ASSIGN(/)
#undef EMU_ASSIGN
};

template <class T> METAL_FUNC constexpr float emu_read(const T& x) {
  if constexpr (emu_rank<T> == 5) return x.v;
  else if constexpr (emu_rank<T> >= 3) return emu_float(x).v;
  else return float(x);
}

#define EMU_OP(op, noted, Result)                                                            \
  template <class L, class R,                                                                \
            enable_if_t<emu_to_float<emu_bare_t<L>, emu_bare_t<R>>, int> = 0>                \
  METAL_FUNC constexpr Result operator op(L&& l, R&& r) {                                    \
    EMU_NOTE(noted);                                                                         \
    return Result(emu_read<emu_bare_t<L>>(l) op emu_read<emu_bare_t<R>>(r));                 \
  }                                                                                          \
  template <class L, class R,                                                                \
            enable_if_t<emu_to_half<emu_bare_t<L>, emu_bare_t<R>>, int> = 0>                 \
  METAL_FUNC constexpr auto operator op(L&& l, R&& r) {                                      \
    EMU_NOTE(noted);                                                                         \
    using H = conditional_t<is_same_v<Result, bool>, bool, emu_half>;                        \
    return H(emu_read<emu_bare_t<L>>(l) op emu_read<emu_bare_t<R>>(r));                      \
  }
EMU_OP(*, mul, emu_product)
EMU_OP(/, division, emu_float)
EMU_OP(<, compare, bool)
EMU_OP(>, compare, bool)
EMU_OP(<=, compare, bool)
EMU_OP(>=, compare, bool)
EMU_OP(==, compare, bool)
EMU_OP(!=, compare, bool)
#undef EMU_OP

// A temporary product as an operand: its multiplication and this addition are one instruction.
#define EMU_OP(op)                                                                           \
  template <class L, class R,                                                                \
            enable_if_t<emu_to_float<emu_bare_t<L>, emu_bare_t<R>>, int> = 0>                \
  METAL_FUNC constexpr emu_float operator op(L&& l, R&& r) {                                 \
    if constexpr (is_same_v<L, emu_product> || is_same_v<R, emu_product>) {                  \
      emu_note<EMU_N_mul, -1>();                                                             \
      EMU_NOTE(fma);                                                                         \
    } else {                                                                                 \
      EMU_NOTE(add);                                                                         \
    }                                                                                        \
    return emu_float(emu_read<emu_bare_t<L>>(l) op emu_read<emu_bare_t<R>>(r));              \
  }                                                                                          \
  template <class L, class R,                                                                \
            enable_if_t<emu_to_half<emu_bare_t<L>, emu_bare_t<R>>, int> = 0>                 \
  METAL_FUNC constexpr emu_half operator op(L&& l, R&& r) {                                  \
    EMU_NOTE(add);                                                                           \
    return emu_half(emu_read<emu_bare_t<L>>(l) op emu_read<emu_bare_t<R>>(r));               \
  }
EMU_OP(+)
EMU_OP(-)
#undef EMU_OP

#define EMU_ASSIGN(op)                                                                       \
  template <class R> METAL_FUNC constexpr emu_float& emu_float::operator op##=(R&& r) {      \
    return *this = emu_float(*this op static_cast<R&&>(r));                                  \
  }                                                                                          \
  template <class R> METAL_FUNC emu_half& emu_half::operator op##=(R&& r) {                  \
    return *this = emu_half(*this op static_cast<R&&>(r));                                   \
  }
EMU_ASSIGN(+) EMU_ASSIGN(-) EMU_ASSIGN(*) EMU_ASSIGN(/)
#undef EMU_ASSIGN

}  // namespace metal

using metal::emu_float;
typedef metal::emu_half half;
