// A 16-bit float as a class: it widens to float by itself; float and the other 16-bit type are
// narrowed to it only by an explicit cast, integers by themselves. Arithmetic is in float, rounded
// once.
#pragma once

#define EMU_SMALL_OP(NAME, op)                                                                 \
  METAL_FUNC constexpr NAME operator op(NAME a, NAME b) {                                      \
    return NAME(emu_float(a) op emu_float(b));                                                 \
  }                                                                                            \
  template <class I, enable_if_t<emu_int_v<I>, int> = 0>                                       \
  METAL_FUNC constexpr NAME operator op(NAME a, I b) {                                         \
    return NAME(emu_float(a) op emu_float(b));                                                 \
  }                                                                                            \
  template <class I, enable_if_t<emu_int_v<I>, int> = 0>                                       \
  METAL_FUNC constexpr NAME operator op(I a, NAME b) {                                         \
    return NAME(emu_float(a) op emu_float(b));                                                 \
  }
#define EMU_SMALL_ASSIGN(NAME, op)                                                             \
  template <class T> METAL_FUNC NAME& operator op##=(T y) {                                    \
    return *this = NAME(emu_float(*this) op emu_float(y));                                     \
  }
#define EMU_SMALL_CMP(NAME, op)                                                                \
  METAL_FUNC constexpr bool operator op(NAME a, NAME b) { return emu_float(a) op emu_float(b); }

#define EMU_SMALL_FLOAT(NAME, TO_BITS, TO_FLOAT)                                               \
  struct NAME {                                                                                \
    uint16_t bits;                                                                             \
    NAME() = default;                                                                          \
    template <class T, enable_if_t<emu_int_v<T>, int> = 0>                                     \
    METAL_FUNC constexpr NAME(T x) : bits(TO_BITS(float(x))) {}                                \
    template <class T, enable_if_t<!emu_int_v<T> && is_convertible_v<T, emu_float>, int> = 0>  \
    METAL_FUNC explicit constexpr NAME(T x) : bits(TO_BITS(emu_plain(emu_float(x)))) {}        \
    METAL_FUNC constexpr operator float() const { return TO_FLOAT(bits); }                     \
    METAL_FUNC static constexpr NAME from_bits(uint16_t b) {                                   \
      return __builtin_bit_cast(NAME, b);                                                      \
    }                                                                                          \
    EMU_SMALL_ASSIGN(NAME, +)                                                                  \
    EMU_SMALL_ASSIGN(NAME, -)                                                                  \
    EMU_SMALL_ASSIGN(NAME, *)                                                                  \
    EMU_SMALL_ASSIGN(NAME, /)                                                                  \
  };                                                                                           \
  EMU_SMALL_OP(NAME, +)                                                                        \
  EMU_SMALL_OP(NAME, -)                                                                        \
  EMU_SMALL_OP(NAME, *)                                                                        \
  EMU_SMALL_OP(NAME, /)                                                                        \
  METAL_FUNC constexpr NAME operator-(NAME a) { return NAME::from_bits(a.bits ^ 0x8000u); }    \
  EMU_SMALL_CMP(NAME, <)                                                                       \
  EMU_SMALL_CMP(NAME, >)                                                                       \
  EMU_SMALL_CMP(NAME, <=)                                                                      \
  EMU_SMALL_CMP(NAME, >=)                                                                      \
  EMU_SMALL_CMP(NAME, ==)                                                                      \
  EMU_SMALL_CMP(NAME, !=)
