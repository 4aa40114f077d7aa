// 8 x 8 matrices spread over a SIMD-group, in the layout of Apple's GPUs: lane l holds
// (row, column) and (row, column + 1) with row = 4 (l / 16) + (l / 2) % 4 and
// column = 4 ((l / 8) % 2) + 2 (l % 2).
#pragma once
#include "simd.h"

extern "C" uint32_t emu_lane() __attribute__((const));  // the same all through a thread

namespace metal {

template <class T, int Rows, int Cols> struct simdgroup_matrix {
  static_assert(Rows == 8 && Cols == 8, "simdgroup_matrix is 8 x 8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    const uint32_t l = emu_lane(), row = (l / 16) * 4 + (l / 2) % 4;
    const uint32_t col = ((l / 8) % 2) * 4 + (l % 2) * 2;
    elements = vec<T, 2>(row == col ? diagonal : T(0), row == col + 1 ? diagonal : T(0));
  }
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
  METAL_FUNC const vec<T, 2>& thread_elements() const { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<emu_float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int R = 8, int C = R> METAL_FUNC simdgroup_matrix<T, R, C>
make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.elements = vec<T, 2>(value, value);
  return m;
}

// The place of this lane's first element, and the step to its second.
template <class P> METAL_FUNC P* emu_matrix_place(P* p, ulong stride, vec<ulong, 2> origin,
                                                  bool transpose, ulong& step, uint32_t line) {
  if (transpose && (origin.x || origin.y))
    emu_raise(EMU_UNSUPPORTED, "a transposed simdgroup_load or store with an origin", line);
#ifdef EMU_COUNT
  if (sizeof(P) == 2) emu_note<EMU_N_matrix16, 2>();
#else
  emu_matrix_access(line);
#endif
  const ulong l = emu_lane(), row = (l / 16) * 4 + (l / 2) % 4;
  const ulong col = ((l / 8) % 2) * 4 + (l % 2) * 2;
  step = transpose ? stride : 1;
  return p + (transpose ? col * stride + row : (row + origin.y) * stride + col + origin.x);
}
template <class T> METAL_FUNC void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& m, const T* p, ulong stride = 8, vec<ulong, 2> origin = 0,
    bool transpose = false, EMU_LINE) {
  ulong step;
  const T* at = emu_matrix_place(p, stride, origin, transpose, step, line);
  m.elements = vec<T, 2>(at[0], at[step]);
}
template <class T> METAL_FUNC void simdgroup_store(
    simdgroup_matrix<T, 8, 8> m, T* p, ulong stride = 8, vec<ulong, 2> origin = 0,
    bool transpose = false, EMU_LINE) {
  ulong step;
  T* at = emu_matrix_place(p, stride, origin, transpose, step, line);
  at[0] = m.elements.e[0];
  at[step] = m.elements.e[1];
}

METAL_FUNC uint64_t emu_pack2(float x, float y) {
  return uint64_t(__builtin_bit_cast(uint32_t, x)) |
         uint64_t(__builtin_bit_cast(uint32_t, y)) << 32;
}
template <class T> METAL_FUNC uint64_t emu_pack_matrix(const simdgroup_matrix<T, 8, 8>& m) {
  return emu_pack2(emu_raw(m.elements.e[0]), emu_raw(m.elements.e[1]));
}
// d = a b + c, accumulated in float; the operands' types may differ.
template <class D, class A, class B, class C> METAL_FUNC void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c, EMU_LINE) {
  const uint64_t r =
      emu_exchange_mma(emu_pack_matrix(a), emu_pack_matrix(b), emu_pack_matrix(c), line);
  d.elements = vec<D, 2>(emu_from_raw<D>(__builtin_bit_cast(float, uint32_t(r))),
                         emu_from_raw<D>(__builtin_bit_cast(float, uint32_t(r >> 32))));
}
template <class D, class A, class B> METAL_FUNC void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    EMU_LINE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<emu_float>(0.f), line);
}
template <class T> METAL_FUNC simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a,
                                                                  simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

}  // namespace metal
