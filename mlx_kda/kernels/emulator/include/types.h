// Scalar types and casts of the Metal standard library for a host compiler.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "traits.h"

#ifdef EMU_COUNT
#include "counted.h"  // emu_float and half: the same values, every operation counted
#else
typedef float emu_float;
typedef _Float16 half;
#endif

namespace metal {

template <class T> struct remove_addrspace { using type = T; };  // one address space here
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;

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

// bfloat widens to float by itself; float and half are narrowed to it only by an explicit cast.
constexpr uint16_t emu_bfloat_bits(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);  // keep NaN a NaN
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#ifdef EMU_COUNT
METAL_FUNC constexpr float emu_plain(emu_float x) { return x.v; }
#endif
METAL_FUNC constexpr float emu_plain(float x) { return x; }

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class T, enable_if_t<emu_int_v<T>, int> = 0>
  METAL_FUNC constexpr bfloat(T x) : bits(emu_bfloat_bits(float(x))) {}
  template <class T, enable_if_t<!emu_int_v<T> && is_convertible_v<T, emu_float>, int> = 0>
  METAL_FUNC explicit constexpr bfloat(T x) : bits(emu_bfloat_bits(emu_plain(emu_float(x)))) {}
  METAL_FUNC constexpr operator float() const {
    return __builtin_bit_cast(float, uint32_t(bits) << 16);
  }
  static constexpr bfloat from_bits(uint16_t b) { return __builtin_bit_cast(bfloat, b); }
#define EMU_BF_ASSIGN(op)                                                  \
  template <class T> METAL_FUNC bfloat& operator op##=(T y) {              \
    return *this = bfloat(emu_float(*this) op emu_float(y));               \
  }
  EMU_BF_ASSIGN(+) EMU_BF_ASSIGN(-) EMU_BF_ASSIGN(*) EMU_BF_ASSIGN(/)
#undef EMU_BF_ASSIGN
};

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

}  // namespace metal
using metal::bfloat;
#include "numbers.h"

template <class To, class From> METAL_FUNC constexpr To as_type(From from) {
  return metal::emu_bit_cast<To>(from);
}
