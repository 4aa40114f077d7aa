// The SIMD-group operations, computed once by the lane that arrives last.
#include "state.h"

#include <string.h>

bool meet(SimdGroup* g, Fiber* f, uint32_t op, uint32_t line);
void release(SimdGroup* g);

namespace {

template <class T> T get(uint64_t u) {
  T x;
  memcpy(&x, &u, sizeof x);
  return x;
}
template <class T> uint64_t put(T x) {
  uint64_t u = 0;
  memcpy(&u, &x, sizeof x);
  return u;
}

// bfloat is combined in float and rounded after every step; half is a type of the compiler's.
struct Bfloat {
  uint16_t bits;
  explicit Bfloat(int x) : Bfloat(float(x)) {}
  explicit Bfloat(float f) {
    uint32_t u = uint32_t(put(f));
    if ((u & 0x7fffffffu) <= 0x7f800000u) u += 0x7fffu + ((u >> 16) & 1u);
    bits = uint16_t(u >> 16);
  }
  Bfloat() = default;
  float wide() const { return get<float>(uint64_t(bits) << 16); }
  friend Bfloat operator+(Bfloat a, Bfloat b) { return Bfloat(a.wide() + b.wide()); }
  friend Bfloat operator*(Bfloat a, Bfloat b) { return Bfloat(a.wide() * b.wide()); }
  friend bool operator<(Bfloat a, Bfloat b) { return a.wide() < b.wide(); }
};

template <class T> T combine(uint32_t op, T a, T b) {
  switch (op) {
    case EMU_SUM: return T(a + b);
    case EMU_PRODUCT: return T(a * b);
    case EMU_MIN: return b < a ? b : a;
    default: return a < b ? b : a;
  }
}

// Sums run as the ascending butterfly (lane xor 1, 2, 4, 8, 16); lanes that do not exist are left out.
template <class T> void reduce(uint32_t op, const uint64_t* in, uint64_t* out, uint32_t n) {
  T v[kLanes];
  for (uint32_t i = 0; i < n; ++i) v[i] = get<T>(in[i]);
  for (uint32_t width = 1; width < n; width *= 2)
    for (uint32_t i = 0; i + width < n; i += 2 * width) v[i] = combine(op, v[i], v[i + width]);
  for (uint32_t i = 0; i < n; ++i) out[i] = put(v[0]);
}

template <class T> void scan(uint32_t op, const uint64_t* in, uint64_t* out, uint32_t n) {
  const bool exclusive = op == EMU_PREFIX_SUM_EXCLUSIVE || op == EMU_PREFIX_PRODUCT_EXCLUSIVE;
  const bool product = op == EMU_PREFIX_PRODUCT || op == EMU_PREFIX_PRODUCT_EXCLUSIVE;
  const uint32_t step = product ? EMU_PRODUCT : EMU_SUM;
  T run = T(product ? 1 : 0);
  for (uint32_t i = 0; i < n; ++i) {
    if (exclusive) out[i] = put(run);
    run = i == 0 && !exclusive ? get<T>(in[0]) : combine(step, run, get<T>(in[i]));
    if (!exclusive) out[i] = put(run);
  }
}

template <class T> void typed(uint32_t op, const uint64_t* in, uint64_t* out, uint32_t n) {
  if (op >= EMU_PREFIX_SUM) scan<T>(op, in, out, n);
  else reduce<T>(op, in, out, n);
}

void arithmetic(uint32_t op, uint32_t type, const uint64_t* in, uint64_t* out, uint32_t n) {
  switch (type) {
    case EMU_F32: return typed<float>(op, in, out, n);
    case EMU_F16: return typed<_Float16>(op, in, out, n);
    case EMU_BF16: return typed<Bfloat>(op, in, out, n);
    case EMU_I32: return typed<int32_t>(op, in, out, n);
    case EMU_U32: return typed<uint32_t>(op, in, out, n);
    case EMU_I16: return typed<int16_t>(op, in, out, n);
    case EMU_U16: return typed<uint16_t>(op, in, out, n);
    case EMU_I8: return typed<int8_t>(op, in, out, n);
    case EMU_U8: return typed<uint8_t>(op, in, out, n);
    case EMU_I64: return typed<int64_t>(op, in, out, n);
    default: return typed<uint64_t>(op, in, out, n);
  }
}

// One operation over n lanes that stand together: a SIMD-group, or a quad of it.
void compute(uint32_t op, uint32_t type, const uint64_t* in, const uint64_t* by, uint64_t* out,
             uint32_t n, uint32_t line) {
  uint64_t all = op == EMU_AND ? ~0ull : 0;
  switch (op) {
    case EMU_AND:
      for (uint32_t i = 0; i < n; ++i) all &= in[i];
      break;
    case EMU_OR:
      for (uint32_t i = 0; i < n; ++i) all |= in[i];
      break;
    case EMU_XOR:
      for (uint32_t i = 0; i < n; ++i) all ^= in[i];
      break;
    case EMU_BALLOT:
      for (uint32_t i = 0; i < n; ++i) all |= uint64_t(in[i] & 1) << i;
      break;
    case EMU_SHUFFLE:
    case EMU_SHUFFLE_XOR:
    case EMU_SHUFFLE_UP:
    case EMU_SHUFFLE_DOWN:
    case EMU_ROTATE_UP:
    case EMU_ROTATE_DOWN:
      for (uint32_t i = 0; i < n; ++i) {
        const uint32_t k = uint32_t(by[i]);
        uint32_t from = i;
        if (op == EMU_SHUFFLE) from = k;
        else if (op == EMU_SHUFFLE_XOR) from = i ^ k;
        else if (op == EMU_SHUFFLE_UP) from = i >= k ? i - k : i;
        else if (op == EMU_SHUFFLE_DOWN) from = i + k < n ? i + k : i;
        else if (op == EMU_ROTATE_UP) from = (i + n - k % n) % n;
        else from = (i + k) % n;
        if (from >= n)
          raise_at(EMU_OUT_OF_BOUNDS, line, 0, "a shuffle reads lane %u of %u", from, n);
        out[i] = in[from];
      }
      return;
    case EMU_SIMD_BARRIER: return;
    default: return arithmetic(op, type, in, out, n);
  }
  for (uint32_t i = 0; i < n; ++i) out[i] = all;
}
}  // namespace

extern "C" uint64_t emu_simd(uint32_t op, uint32_t type, uint64_t value, uint32_t argument,
                             uint32_t line) {
  Fiber* f = emu_current;
  SimdGroup* g = f->group;
  const uint32_t p = g->phase, lane = f->lane;
  g->in[p][0][lane] = value;
  g->in[p][1][lane] = argument;
  if (meet(g, f, op, line)) {
    const uint32_t width = op & EMU_QUAD ? 4 : kLanes;
    for (uint32_t at = 0; at < g->lanes; at += width) {
      const uint32_t n = g->lanes - at < width ? g->lanes - at : width;
      compute(op & ~uint32_t(EMU_QUAD), type, g->in[p][0] + at, g->in[p][1] + at, g->out[p] + at,
              n, line);
    }
    check_simd(g, op, argument);
    g->phase ^= 1;
    release(g);
  }
  return g->out[p][lane];
}

extern "C" uint64_t emu_mma(uint64_t a, uint64_t b, uint64_t c, uint32_t line) {
  Fiber* f = emu_current;
  SimdGroup* g = f->group;
  const uint32_t p = g->phase, lane = f->lane;
  g->in[p][0][lane] = a;
  g->in[p][1][lane] = b;
  g->in[p][2][lane] = c;
  if (meet(g, f, EMU_MMA, line)) {
    if (g->lanes != kLanes)
      raise_at(EMU_DIVERGENCE, line, 0, "a matrix operation in a SIMD-group of %u lanes", g->lanes);
    float m[3][8][8];
    for (uint32_t l = 0; l < kLanes; ++l) {
      const uint32_t row = l / 16 * 4 + l / 2 % 4, col = l / 8 % 2 * 4 + l % 2 * 2;
      for (int k = 0; k < 3; ++k) memcpy(&m[k][row][col], &g->in[p][k][l], 8);
    }
    for (int i = 0; i < 8; ++i)
      for (int k = 0; k < 8; ++k)
        for (int j = 0; j < 8; ++j)
          m[2][i][j] = __builtin_fmaf(m[0][i][k], m[1][k][j], m[2][i][j]);
    for (uint32_t l = 0; l < kLanes; ++l) {
      const uint32_t row = l / 16 * 4 + l / 2 % 4, col = l / 8 % 2 * 4 + l % 2 * 2;
      memcpy(&g->out[p][l], &m[2][row][col], 8);
    }
    check_simd(g, EMU_MMA, 0);
    g->phase ^= 1;
    release(g);
  }
  return g->out[p][lane];
}

extern "C" uint64_t emu_peek(const volatile void* p, uint32_t bytes) {
  uint64_t u = 0;
  memcpy(&u, const_cast<const void*>(p), bytes);
  return u;
}
extern "C" void emu_poke(volatile void* p, uint32_t bytes, uint64_t value) {
  memcpy(const_cast<void*>(p), &value, bytes);
}
