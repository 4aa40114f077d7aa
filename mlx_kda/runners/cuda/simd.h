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

METAL_FUNC uint emu_group_size() { return blockDim.x * blockDim.y * blockDim.z; }
METAL_FUNC uint emu_hardware_index() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
METAL_FUNC uint emu_hardware_lane() { return emu_hardware_index() % 32; }
// The lanes of this thread's SIMD-group, the last of a threadgroup may be narrower.
METAL_FUNC uint emu_lanes() {
  const uint rest = emu_group_size() - emu_hardware_index() / 32 * 32;
  return rest < 32 ? rest : 32;
}
METAL_FUNC uint emu_mask() { return 0xffffffffu >> (32 - emu_lanes()); }

// Lanes are numbered so that a matrix lies in a SIMD-group as tensor cores want it (matrix.h): bits
// 4 2 1 3 0 of a hardware lane are those of Metal's. A narrower SIMD-group has no matrices and keeps
// its order. A thread's index and position in its threadgroup follow from its lane.
METAL_FUNC uint emu_metal_lane(uint hardware) {
  return (hardware & 17) | (hardware & 2) << 2 | (hardware & 12) >> 1;
}
METAL_FUNC uint emu_hardware_lane_of(uint lane) {
  if (emu_lanes() < 32) return lane;
  return (lane & 17) | (lane & 8) >> 2 | (lane & 6) << 1;
}
METAL_FUNC uint emu_lane() {
  return emu_lanes() < 32 ? emu_hardware_lane() : emu_metal_lane(emu_hardware_lane());
}
METAL_FUNC uint emu_index_in_group() { return emu_hardware_index() / 32 * 32 + emu_lane(); }
METAL_FUNC vec<uint, 3> emu_position_in_group() {
  const uint i = emu_index_in_group();
  if (blockDim.y * blockDim.z == 1) return vec<uint, 3>(i, 0u, 0u);
  const uint row = i / blockDim.x;
  return vec<uint, 3>(i - row * blockDim.x, row % blockDim.y, row / blockDim.y);
}

// Lane `from` of x, for numbers of up to eight bytes and vectors of them.
template <class T> METAL_FUNC T emu_take(T x, uint from) {
  if constexpr (emu_vec_of<T>::N > 0) {
    T r;
    for (int i = 0; i < emu_vec_of<T>::N; ++i) r.e[i] = emu_take(x.e[i], from);
    return r;
  } else if constexpr (sizeof(T) == 8) {
    const unsigned long long u = __builtin_bit_cast(unsigned long long, x);
    return __builtin_bit_cast(T, __shfl_sync(emu_mask(), u, emu_hardware_lane_of(from)));
  } else if constexpr (sizeof(T) == 4) {
    const uint u = __builtin_bit_cast(uint, x);
    return __builtin_bit_cast(T, __shfl_sync(emu_mask(), u, emu_hardware_lane_of(from)));
  } else if constexpr (sizeof(T) == 2) {
    const uint u = __builtin_bit_cast(ushort, x);
    return __builtin_bit_cast(T, ushort(__shfl_sync(emu_mask(), u, emu_hardware_lane_of(from))));
  } else {
    const uint u = __builtin_bit_cast(uchar, x);
    return __builtin_bit_cast(T, uchar(__shfl_sync(emu_mask(), u, emu_hardware_lane_of(from))));
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
  using vote_t = ulong;
  vote_t votes;
  METAL_FUNC explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  METAL_FUNC explicit constexpr operator vote_t() const { return votes; }
  METAL_FUNC bool all() const { return votes == 0xfffffffful; }
  METAL_FUNC bool any() const { return votes != 0; }
};
METAL_FUNC simd_vote simd_ballot(bool x) {
  const uint votes = __ballot_sync(emu_mask(), x);  // a bit a hardware lane
  return simd_vote(simd_or(votes >> emu_hardware_lane() & 1 ? 1u << emu_lane() : 0u));
}
METAL_FUNC simd_vote simd_active_threads_mask() { return simd_ballot(true); }
METAL_FUNC bool simd_is_first() { return emu_lane() == 0; }

