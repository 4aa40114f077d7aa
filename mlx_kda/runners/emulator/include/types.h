// Scalar types and casts of the Metal standard library for a host compiler.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "traits.h"

#if defined(EMU_COUNT)
#include "counted.h"  // emu_float and half: the same values, every operation counted
#elif defined(__CUDACC__)
typedef float emu_float;  // half is a class, below: CUDA's own is ambiguous in too many places
#else
typedef float emu_float;
typedef _Float16 half;
#endif

#include "small_float.h"

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

#ifdef __CUDACC__
METAL_FUNC constexpr uint16_t emu_half_bits(float f) {
  if (!__builtin_is_constant_evaluated()) return __half_as_ushort(__float2half_rn(f));
  const uint32_t u = __builtin_bit_cast(uint32_t, f), sign = u >> 16 & 0x8000u;
  const int e = int(u >> 23 & 255u) - 112;  // constants that half holds exactly, or infinity
  if (e >= 31) return uint16_t(sign | 0x7c00u | ((u & 0x7fffffffu) > 0x7f800000u ? 0x200u : 0u));
  if (e > 0) return uint16_t(sign | uint32_t(e) << 10 | (u >> 13 & 0x3ffu));
  return uint16_t(sign | (e < -10 ? 0u : (u & 0x7fffffu | 0x800000u) >> (14 - e)));
}
METAL_FUNC constexpr float emu_half_value(uint16_t bits) {
  if (!__builtin_is_constant_evaluated()) return __half2float(__ushort_as_half(bits));
  return 0.0f;  // no constant is made from a half
}
#endif

METAL_FUNC constexpr uint16_t emu_bfloat_bits(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);  // keep NaN a NaN
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

METAL_FUNC constexpr float emu_bfloat_value(uint16_t bits) {
  return __builtin_bit_cast(float, uint32_t(bits) << 16);
}

#ifdef EMU_COUNT
METAL_FUNC constexpr float emu_plain(emu_float x) { return x.v; }
#endif
METAL_FUNC constexpr float emu_plain(float x) { return x; }

EMU_SMALL_FLOAT(bfloat, emu_bfloat_bits, emu_bfloat_value)
#ifdef __CUDACC__
EMU_SMALL_FLOAT(half, emu_half_bits, emu_half_value)
#endif

}  // namespace metal
using metal::bfloat;
#ifdef __CUDACC__
using metal::half;
#endif
#include "numbers.h"

template <class To, class From> METAL_FUNC constexpr To as_type(From from) {
  return metal::emu_bit_cast<To>(from);
}
