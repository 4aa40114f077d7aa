// SIMD-group and quad-group functions, barriers and threadgroup variables.
#pragma once
#include "math.h"
#include "runtime.h"

// The line of the call in the generated text, for fault reports.
#define EMU_LINE uint32_t line = __builtin_LINE()

enum class mem_flags : uint32_t { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4,
                                  mem_threadgroup_imageblock = 8 };
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint32_t(a) | uint32_t(b));
}

// Exchanges between lanes. The counting build calls them so that the compiler sees no access to
// memory: like Metal's compiler it may then keep in registers what it has loaded before.
#if defined(EMU_COUNT) && defined(__x86_64__)
#if defined(__AVX512F__)
#define EMU_CLOBBERS_512                                                                      \
  , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", \
      "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#else
#define EMU_CLOBBERS_512
#endif
#define EMU_CLOBBERS                                                                          \
  "rbx", "r9", "r10", "r11", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6",    \
      "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",                    \
      "xmm15" EMU_CLOBBERS_512
#define EMU_CALL(name) \
  "movq %%rsp, %%rbx\n\tandq $-16, %%rsp\n\tcall " name "\n\tmovq %%rbx, %%rsp"
METAL_FUNC uint64_t emu_exchange(uint64_t op, uint64_t type, uint64_t value, uint64_t argument,
                                 uint64_t line) {
  uint64_t result;  // no register variable for r8: gcc would take the asm for a memory access
  asm volatile("movq %[line], %%r8\n\t" EMU_CALL("emu_simd")
               : "=a"(result), "+D"(op), "+S"(type), "+d"(value), "+c"(argument)
               : [line] "r"(line)
               : "r8", EMU_CLOBBERS);
  return result;
}
METAL_FUNC uint64_t emu_exchange_mma(uint64_t a, uint64_t b, uint64_t c, uint64_t line) {
  uint64_t result;
  asm volatile(EMU_CALL("emu_mma")
               : "=a"(result), "+D"(a), "+S"(b), "+d"(c), "+c"(line)
               :
               : "r8", EMU_CLOBBERS);
  return result;
}
#else
METAL_FUNC uint64_t emu_exchange(uint32_t op, uint32_t type, uint64_t value, uint32_t argument,
                                 uint32_t line) {
  return emu_simd(op, type, value, argument, line);
}
METAL_FUNC uint64_t emu_exchange_mma(uint64_t a, uint64_t b, uint64_t c, uint32_t line) {
  return emu_mma(a, b, c, line);
}
#endif

namespace metal {
using ::mem_flags;

METAL_FUNC void threadgroup_barrier(mem_flags flags, EMU_LINE) {
  emu_barrier(uint32_t(flags), line);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, EMU_LINE) {
  emu_simd(EMU_SIMD_BARRIER, 0, 0, uint32_t(flags), line);
}

template <class T> struct emu_type_is { using type = T; };
template <class T> using emu_type_of = typename emu_type_is<T>::type;
// A variable of the threadgroup: one object for all its threads, its contents undefined at first.
template <class T> struct emu_element { using type = T; };
template <class T, size_t N> struct emu_element<T[N]> { using type = typename emu_element<T>::type; };
template <class T> METAL_FUNC T& emu_shared(uint32_t id, EMU_LINE) {
  using E = typename emu_element<T>::type;
  return *static_cast<T*>(emu_shared_new(id, sizeof(T), sizeof(E), emu_float_v<E>, line));
}

template <class T> struct emu_type_code;
#define EMU_CODE(T, code) \
  template <> struct emu_type_code<T> { static constexpr uint32_t value = code; };
EMU_CODE(emu_float, EMU_F32) EMU_CODE(half, EMU_F16) EMU_CODE(bfloat, EMU_BF16)
EMU_CODE(int, EMU_I32) EMU_CODE(uint, EMU_U32) EMU_CODE(short, EMU_I16) EMU_CODE(ushort, EMU_U16)
EMU_CODE(char, EMU_I8) EMU_CODE(signed char, EMU_I8) EMU_CODE(uchar, EMU_U8) EMU_CODE(bool, EMU_U8)
EMU_CODE(long, EMU_I64) EMU_CODE(ulong, EMU_U64)
#undef EMU_CODE

template <class T> METAL_FUNC uint64_t emu_pack(T x) {
  if constexpr (sizeof(T) == 8) return emu_bit_cast<uint64_t>(x);
  else if constexpr (sizeof(T) == 4) return emu_bit_cast<uint32_t>(x);
  else if constexpr (sizeof(T) == 2) return emu_bit_cast<uint16_t>(x);
  else return emu_bit_cast<uint8_t>(x);
}
template <class T> METAL_FUNC T emu_unpack(uint64_t u) {
  if constexpr (sizeof(T) == 8) return emu_bit_cast<T>(u);
  else if constexpr (sizeof(T) == 4) return emu_bit_cast<T>(uint32_t(u));
  else if constexpr (sizeof(T) == 2) return emu_bit_cast<T>(uint16_t(u));
  else return emu_bit_cast<T>(uint8_t(u));
}

#define EMU_SIMD1(name, op)                                                               \
  template <class A, class T = emu_value_t<A>, uint32_t code = emu_type_code<T>::value>   \
  METAL_FUNC T name(A x, EMU_LINE) {                                                      \
    return emu_unpack<T>(emu_exchange(op, code, emu_pack(T(x)), 0, line));                    \
  }                                                                                       \
  template <class T, int N> METAL_FUNC vec<T, N> name(vec<T, N> x, EMU_LINE) {            \
    vec<T, N> r;                                                                          \
    for (int i = 0; i < N; ++i) r.e[i] = name(x.e[i], line);                              \
    return r;                                                                             \
  }
#define EMU_SIMD2(name, op)                                                               \
  template <class A, class T = emu_value_t<A>, uint32_t code = emu_type_code<T>::value>   \
  METAL_FUNC T name(A x, ushort by, EMU_LINE) {                                           \
    return emu_unpack<T>(emu_exchange(op, code, emu_pack(T(x)), by, line));                   \
  }                                                                                       \
  template <class T, int N> METAL_FUNC vec<T, N> name(vec<T, N> x, ushort by, EMU_LINE) { \
    vec<T, N> r;                                                                          \
    for (int i = 0; i < N; ++i) r.e[i] = name(x.e[i], by, line);                          \
    return r;                                                                             \
  }
#define EMU_GROUP_FUNCTIONS(prefix, q)                                                    \
  EMU_SIMD1(prefix##_sum, q + EMU_SUM)                                                    \
  EMU_SIMD1(prefix##_product, q + EMU_PRODUCT)                                            \
  EMU_SIMD1(prefix##_min, q + EMU_MIN)                                                    \
  EMU_SIMD1(prefix##_max, q + EMU_MAX)                                                    \
  EMU_SIMD1(prefix##_and, q + EMU_AND)                                                    \
  EMU_SIMD1(prefix##_or, q + EMU_OR)                                                      \
  EMU_SIMD1(prefix##_xor, q + EMU_XOR)                                                    \
  EMU_SIMD1(prefix##_prefix_inclusive_sum, q + EMU_PREFIX_SUM)                            \
  EMU_SIMD1(prefix##_prefix_exclusive_sum, q + EMU_PREFIX_SUM_EXCLUSIVE)                  \
  EMU_SIMD1(prefix##_prefix_inclusive_product, q + EMU_PREFIX_PRODUCT)                    \
  EMU_SIMD1(prefix##_prefix_exclusive_product, q + EMU_PREFIX_PRODUCT_EXCLUSIVE)          \
  EMU_SIMD2(prefix##_shuffle, q + EMU_SHUFFLE)                                            \
  EMU_SIMD2(prefix##_broadcast, q + EMU_SHUFFLE)                                          \
  EMU_SIMD2(prefix##_shuffle_xor, q + EMU_SHUFFLE_XOR)                                    \
  EMU_SIMD2(prefix##_shuffle_up, q + EMU_SHUFFLE_UP)                                      \
  EMU_SIMD2(prefix##_shuffle_down, q + EMU_SHUFFLE_DOWN)                                  \
  EMU_SIMD2(prefix##_shuffle_rotate_up, q + EMU_ROTATE_UP)                                \
  EMU_SIMD2(prefix##_shuffle_rotate_down, q + EMU_ROTATE_DOWN)                            \
  template <class T> METAL_FUNC T prefix##_broadcast_first(T x, EMU_LINE) {               \
    return prefix##_shuffle(x, ushort(0), line);                                          \
  }                                                                                       \
  METAL_FUNC bool prefix##_all(bool x, EMU_LINE) { return prefix##_and(uint(x), line); }  \
  METAL_FUNC bool prefix##_any(bool x, EMU_LINE) { return prefix##_or(uint(x), line); }
EMU_GROUP_FUNCTIONS(simd, 0)
EMU_GROUP_FUNCTIONS(quad, uint32_t(EMU_QUAD))
#undef EMU_GROUP_FUNCTIONS

// The lanes that a shuffle up or down leaves without a source take the filling's lanes instead.
template <class T> METAL_FUNC T simd_shuffle_and_fill_up(T x, T fill, ushort by, EMU_LINE) {
  const T moved = simd_shuffle_up(x, by, line), filled = simd_shuffle_rotate_up(fill, by, line);
  return emu_exchange(EMU_PREFIX_SUM_EXCLUSIVE, EMU_U32, 1, 0, line) >= by ? moved : filled;
}
template <class T> METAL_FUNC T simd_shuffle_and_fill_down(T x, T fill, ushort by, EMU_LINE) {
  const T moved = simd_shuffle_down(x, by, line), filled = simd_shuffle_rotate_down(fill, by, line);
  const uint64_t lane = emu_exchange(EMU_PREFIX_SUM_EXCLUSIVE, EMU_U32, 1, 0, line);
  return lane + by < emu_exchange(EMU_SUM, EMU_U32, 1, 0, line) ? moved : filled;
}

struct simd_vote {
  using vote_t = uint64_t;
  vote_t votes;
  METAL_FUNC explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  METAL_FUNC explicit constexpr operator vote_t() const { return votes; }
  METAL_FUNC bool all() const { return votes == 0xffffffffull; }
  METAL_FUNC bool any() const { return votes != 0; }
};
METAL_FUNC simd_vote simd_ballot(bool x, EMU_LINE) {
  return simd_vote(emu_exchange(EMU_BALLOT, EMU_U8, x, 0, line));
}
METAL_FUNC simd_vote simd_active_threads_mask(EMU_LINE) { return simd_ballot(true, line); }
METAL_FUNC bool simd_is_first(EMU_LINE) {
  return emu_exchange(EMU_PREFIX_SUM_EXCLUSIVE, EMU_U32, 1, 0, line) == 0;
}
#undef EMU_SIMD1
#undef EMU_SIMD2

}  // namespace metal
