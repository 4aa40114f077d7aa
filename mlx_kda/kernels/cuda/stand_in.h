// The parts of the Metal standard library that depend on the machine, for a CUDA device: a warp is
// a SIMD-group, a block a threadgroup. Follows the emulator's traits, numbers, vectors and math in
// one text (see header.py), inside MLX's kernel namespace.

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}

namespace metal {

// Both order device and shared memory among the threads they hold up.
METAL_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }

METAL_FUNC uint emu_index_in_group() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
METAL_FUNC uint emu_lane() { return emu_index_in_group() % 32; }
METAL_FUNC uint emu_group_size() { return blockDim.x * blockDim.y * blockDim.z; }
// The lanes of this thread's SIMD-group, the last of a threadgroup may be narrower.
METAL_FUNC uint emu_lanes() {
  const uint rest = emu_group_size() - emu_index_in_group() / 32 * 32;
  return rest < 32 ? rest : 32;
}
METAL_FUNC uint emu_mask() { return 0xffffffffu >> (32 - emu_lanes()); }

// Lane `from` of x, for numbers of up to eight bytes and vectors of them.
template <class T> METAL_FUNC T emu_take(T x, uint from) {
  if constexpr (emu_vec_of<T>::N > 0) {
    T r;
    for (int i = 0; i < emu_vec_of<T>::N; ++i) r.e[i] = emu_take(x.e[i], from);
    return r;
  } else if constexpr (sizeof(T) == 8) {
    const unsigned long long u = __builtin_bit_cast(unsigned long long, x);
    return __builtin_bit_cast(T, __shfl_sync(emu_mask(), u, from));
  } else if constexpr (sizeof(T) == 4) {
    const uint u = __builtin_bit_cast(uint, x);
    return __builtin_bit_cast(T, __shfl_sync(emu_mask(), u, from));
  } else if constexpr (sizeof(T) == 2) {
    const uint u = __builtin_bit_cast(ushort, x);
    return __builtin_bit_cast(T, ushort(__shfl_sync(emu_mask(), u, from)));
  } else {
    const uint u = __builtin_bit_cast(uchar, x);
    return __builtin_bit_cast(T, uchar(__shfl_sync(emu_mask(), u, from)));
  }
}

#define EMU_SHUFFLE(name, source)                                                    \
  template <class T> METAL_FUNC T name(T x, ushort by) {                             \
    const uint lane = emu_lane() % emu_width, first = emu_lane() - lane;             \
    const uint n = emu_width < emu_lanes() ? emu_width : emu_lanes();                \
    (void)n;                                                                         \
    return emu_take(x, first + (source));                                            \
  }
#define EMU_REDUCE(name, expr)                                                       \
  template <class T> METAL_FUNC T name(T x) {                                        \
    for (uint step = 1; step < emu_width; step *= 2) {                               \
      const uint other = emu_lane() ^ step;                                          \
      const T y = emu_take(x, other < emu_lanes() ? other : emu_lane());             \
      if (other < emu_lanes()) x = T(expr);                                          \
    }                                                                                \
    return emu_take(x, emu_lane() / emu_width * emu_width);                          \
  }
#define EMU_SCAN(name, start, expr, inclusive)                                       \
  template <class T> METAL_FUNC T name(T x) {                                        \
    const uint lane = emu_lane() % emu_width;                                        \
    T r = x;                                                                         \
    for (uint step = 1; step < emu_width; step *= 2) {                               \
      const T y = emu_take(r, lane >= step ? emu_lane() - step : emu_lane());        \
      if (lane >= step) r = T(expr);                                                 \
    }                                                                                \
    if (inclusive) return r;                                                         \
    const T before = emu_take(r, lane ? emu_lane() - 1 : emu_lane());                \
    return lane ? before : T(start);                                                 \
  }
#define EMU_GROUP(p)                                                                 \
  EMU_REDUCE(p##_sum, x + y)                                                         \
  EMU_REDUCE(p##_product, x * y)                                                     \
  EMU_REDUCE(p##_min, y < x ? y : x)                                                 \
  EMU_REDUCE(p##_max, x < y ? y : x)                                                 \
  EMU_REDUCE(p##_and, x & y)                                                         \
  EMU_REDUCE(p##_or, x | y)                                                          \
  EMU_REDUCE(p##_xor, x ^ y)                                                         \
  EMU_SCAN(p##_prefix_inclusive_sum, 0, y + r, true)                                 \
  EMU_SCAN(p##_prefix_exclusive_sum, 0, y + r, false)                                \
  EMU_SCAN(p##_prefix_inclusive_product, 1, y * r, true)                             \
  EMU_SCAN(p##_prefix_exclusive_product, 1, y * r, false)                            \
  EMU_SHUFFLE(p##_shuffle, by)                                                       \
  EMU_SHUFFLE(p##_broadcast, by)                                                     \
  EMU_SHUFFLE(p##_shuffle_xor, lane ^ by)                                            \
  EMU_SHUFFLE(p##_shuffle_up, lane >= by ? lane - by : lane)                         \
  EMU_SHUFFLE(p##_shuffle_down, lane + by < n ? lane + by : lane)                    \
  EMU_SHUFFLE(p##_shuffle_rotate_up, (lane + n - by % n) % n)                        \
  EMU_SHUFFLE(p##_shuffle_rotate_down, (lane + by) % n)                              \
  template <class T> METAL_FUNC T p##_broadcast_first(T x) { return p##_shuffle(x, 0); } \
  METAL_FUNC bool p##_all(bool x) { return p##_and(uint(x)) != 0; }                  \
  METAL_FUNC bool p##_any(bool x) { return p##_or(uint(x)) != 0; }
#define emu_width 32u
EMU_GROUP(simd)
#undef emu_width
#define emu_width 4u
EMU_GROUP(quad)
#undef emu_width
#undef EMU_GROUP
#undef EMU_SCAN
#undef EMU_REDUCE
#undef EMU_SHUFFLE

template <class T> METAL_FUNC T simd_shuffle_and_fill_up(T x, T fill, ushort by) {
  const T moved = simd_shuffle_up(x, by), filled = simd_shuffle_rotate_up(fill, by);
  return emu_lane() >= by ? moved : filled;
}
template <class T> METAL_FUNC T simd_shuffle_and_fill_down(T x, T fill, ushort by) {
  const T moved = simd_shuffle_down(x, by), filled = simd_shuffle_rotate_down(fill, by);
  return emu_lane() + by < emu_lanes() ? moved : filled;
}
struct simd_vote {
  using vote_t = unsigned long long;
  vote_t votes;
  METAL_FUNC explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  METAL_FUNC explicit constexpr operator vote_t() const { return votes; }
  METAL_FUNC bool all() const { return votes == 0xffffffffull; }
  METAL_FUNC bool any() const { return votes != 0; }
};
METAL_FUNC simd_vote simd_ballot(bool x) { return simd_vote(__ballot_sync(emu_mask(), x)); }
METAL_FUNC simd_vote simd_active_threads_mask() { return simd_ballot(true); }
METAL_FUNC bool simd_is_first() { return emu_lane() == 0; }

// 8 x 8 matrices in the layout of Apple's GPUs: lane l holds (row, column) and (row, column + 1).
METAL_FUNC uint emu_row() { return emu_lane() / 16 * 4 + emu_lane() / 2 % 4; }
METAL_FUNC uint emu_col() { return emu_lane() / 8 % 2 * 4 + emu_lane() % 2 * 2; }
METAL_FUNC uint emu_holder(uint row, uint col) {
  return row / 4 * 16 + col / 4 * 8 + row % 4 * 2 + col % 4 / 2;
}

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
// d = a b + c in float32: the rows of a and columns of b that this lane needs come by shuffles.
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c) {
  const uint row = emu_row(), col = emu_col();
  const float a0 = float(a.elements.e[0]), a1 = float(a.elements.e[1]);
  const float b0 = float(b.elements.e[0]), b1 = float(b.elements.e[1]);
  float r0 = float(c.elements.e[0]), r1 = float(c.elements.e[1]);
#pragma unroll
  for (uint k = 0; k < 8; ++k) {
    const float x = __shfl_sync(0xffffffffu, k % 2 ? a1 : a0, emu_holder(row, k));
    r0 = ::fmaf(x, __shfl_sync(0xffffffffu, b0, emu_holder(k, col)), r0);
    r1 = ::fmaf(x, __shfl_sync(0xffffffffu, b1, emu_holder(k, col)), r1);
  }
  d.elements.e[0] = D(r0);
  d.elements.e[1] = D(r1);
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

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
template <class T> METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  return const_cast<const volatile T&>(p->value);
}
template <class T, class U>
METAL_FUNC void atomic_store_explicit(volatile atomic<T>* p, U x, memory_order) {
  const_cast<volatile T&>(p->value) = T(x);
}
#define EMU_ATOMIC(name, function)                                                   \
  template <class T, class U>                                                        \
  METAL_FUNC T atomic_##name##_explicit(volatile atomic<T>* p, U x, memory_order) {  \
    return function(const_cast<T*>(&p->value), T(x));                                \
  }
EMU_ATOMIC(exchange, ::atomicExch)
EMU_ATOMIC(fetch_add, ::atomicAdd)
EMU_ATOMIC(fetch_min, ::atomicMin)
EMU_ATOMIC(fetch_max, ::atomicMax)
EMU_ATOMIC(fetch_and, ::atomicAnd)
EMU_ATOMIC(fetch_or, ::atomicOr)
EMU_ATOMIC(fetch_xor, ::atomicXor)
#undef EMU_ATOMIC

}  // namespace metal
using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;
