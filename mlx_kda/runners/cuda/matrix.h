// 8 x 8 matrices in the layout of Apple's GPUs: lane l holds (row, column) and (row, column + 1).
// With the lanes of simd.h that is also a tensor core's layout: hardware lane 4 g + t holds row g and
// columns 2 t, 2 t + 1.
METAL_FUNC uint emu_row() { return emu_lane() / 16 * 4 + emu_lane() / 2 % 4; }
METAL_FUNC uint emu_col() { return emu_lane() / 8 % 2 * 4 + emu_lane() % 2 * 2; }

template <class T, int Rows, int Cols> struct simdgroup_matrix {
  static_assert(Rows == 8 && Cols == 8, "simdgroup_matrix is 8 x 8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    elements.e[0] = emu_row() == emu_col() ? diagonal : T(0);
    elements.e[1] = emu_row() == emu_col() + 1 ? diagonal : T(0);
  }
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
  METAL_FUNC const vec<T, 2>& thread_elements() const { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int R = 8, int C = R>
METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.elements.e[0] = m.elements.e[1] = value;
  return m;
}
template <class P> METAL_FUNC P* emu_matrix_place(P* p, ulong stride, vec<ulong, 2> origin,
                                                  bool transpose, ulong& step) {
  const ulong row = emu_row(), col = emu_col();
  step = transpose ? stride : 1;
  return p + (transpose ? col * stride + row : (row + origin.y) * stride + col + origin.x);
}
template <class T>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* p, ulong stride = 8,
                               vec<ulong, 2> origin = 0, bool transpose = false) {
  ulong step;
  const T* at = emu_matrix_place(p, stride, origin, transpose, step);
  m.elements.e[0] = at[0];
  m.elements.e[1] = at[step];
}
template <class T>
METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> m, T* p, ulong stride = 8,
                                vec<ulong, 2> origin = 0, bool transpose = false) {
  ulong step;
  T* at = emu_matrix_place(p, stride, origin, transpose, step);
  at[0] = m.elements.e[0];
  at[step] = m.elements.e[1];
}

// Products on the tensor cores (compute capability 8.0 and later), which multiply bfloats and add in
// float32. A float is the sum of three bfloats, exactly; a half of two. Two numbers a register.
struct emu_parts {
  uint high, middle, low;
};
METAL_FUNC uint emu_bfloats(float& x0, float& x1) {  // and what is left of x0 and x1
  uint u;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(x1), "f"(x0));
  x0 -= __builtin_bit_cast(float, u << 16);
  x1 -= __builtin_bit_cast(float, u & 0xffff0000u);
  return u;
}
template <class T> METAL_FUNC emu_parts emu_split(float x0, float x1) {
  emu_parts p = {emu_bfloats(x0, x1), 0, 0};
  if constexpr (!is_same_v<T, bfloat>) p.middle = emu_bfloats(x0, x1);
  if constexpr (is_same_v<T, float>) p.low = emu_bfloats(x0, x1);
  return p;
}

METAL_FUNC float emu_word_from(float x, uint hardware_lane) {
  float y;
  asm("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(y) : "f"(x), "r"(hardware_lane));
  return y;
}
// This lane's two elements of the transpose: hardware lane 4 g + t gets (2 t, g) and (2 t + 1, g).
// In each of two shuffles a lane gives away one of its elements: the first to an even g, the second
// to an odd one. Not volatile, so that a matrix in several products is transposed once.
METAL_FUNC vec<float, 2> emu_transposed(float x0, float x1) {
  const uint lane = emu_hardware_lane(), g = lane / 4, even_row = 8 * (lane % 4) + g / 2;
  const bool odd = g % 2;
  const float a = emu_word_from(odd ? x1 : x0, odd ? even_row + 4 : even_row);
  const float b = emu_word_from(odd ? x0 : x1, odd ? even_row : even_row + 4);
  return odd ? vec<float, 2>(b, a) : vec<float, 2>(a, b);
}

// A tensor core has 16 rows: the high parts of a above its middle ones, times one part of b. A lane
// holds what it has to give of a.
METAL_FUNC void emu_tensor(float (&sum)[4], const emu_parts& a, uint b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a.high), "r"(a.middle), "r"(b));
}
// The same, and the low parts of a times the same part of b.
METAL_FUNC void emu_tensor_all(float (&sum)[4], const emu_parts& a, uint b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %8}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a.high), "r"(a.middle), "r"(a.low), "r"(0), "r"(b));
}

// d = a b + c. A tensor core rounds its sums towards zero: the small partial products go first, and
// c is added outside, or a state that goes through thousands of products would shrink.
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c) {
  const emu_parts x = emu_split<A>(float(a.elements.e[0]), float(a.elements.e[1]));
  const vec<float, 2> turned = emu_transposed(float(b.elements.e[0]), float(b.elements.e[1]));
  const emu_parts y = emu_split<B>(turned.e[0], turned.e[1]);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, rest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if constexpr (is_same_v<A, float>) {
    emu_tensor_all(sum, x, y.high);
  } else {
    emu_tensor(sum, x, y.high);
  }
  if constexpr (is_same_v<B, float>) emu_tensor(rest, x, y.low);
  if constexpr (!is_same_v<B, bfloat>) emu_tensor(rest, x, y.middle);
  d.elements.e[0] = D(float(c.elements.e[0]) + (sum[0] + ((sum[2] + rest[0]) + rest[2])));
  d.elements.e[1] = D(float(c.elements.e[1]) + (sum[1] + ((sum[3] + rest[1]) + rest[3])));
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float>(0.0f));
}
template <class T>
METAL_FUNC simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a,
                                               simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

