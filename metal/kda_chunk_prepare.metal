// kda_chunk_prepare: everything of a 16-token chunk that does not need the state.
//
//   P_i = a_1 ... a_i      r_ij = a_(j+1) ... a_i       (per channel)
//   K~_i = k_i P_i         Q~_i = scale q_i P_i         K^_j = k_j r_16,j
//   N_ij = sum_c k_i k_j r_ij (i > j)     M_ij = sum_c scale q_i k_j r_ij (i >= j)
//   T = (I + diag(beta) N)^-1 diag(beta)
//
// Decays are only ever multiplied, and all are at most 1: running products inside the two blocks of
// 8 tokens, (prefix in the later block) x (suffix in the earlier one) across them. Nothing
// overflows for any gate. The inverse is forward substitution in float32; a Neumann series fails on
// repeated keys.
//
// Inputs   q, k [B,T,H,Dk]  g, A_log, dt_bias, beta (see kda_common.h)  lengths [>=B] int
//          dims [T, H, Hv, start, chunks] int  params [scale, bound] float
// Outputs  kq in OpT; kh, tri, decay in float: [B*Hv, chunks, ...] as in kda_chunk.h
//
// Thread map: a threadgroup of 4 SIMD-groups per chunk and value head; grid (128 * chunks, B*Hv).
// Slabs of W = 64 channels (32 where 64 does not divide Dk). In a slab:
//   channels   thread = (block, channel): 8 tokens in registers, prefix and suffix products
//   diagonal   SIMD-group s = columns s and 7-s of both blocks (equal work), lane = (block, 1/16 of
//              the channels): w = k_j; w *= a_i; N_ij += k_i w; M_ij += q_i w
//   across     SIMD-group s = every fourth tile of 8 channels, N and M as matrix products
// Threadgroup bytes: 23,744.
// Order of reductions: a lane over its channels; then 16 lanes (diagonal) or 4 SIMD-groups (across)
// pairwise: errors of N and M are what limits the outputs when keys repeat.
// Why: pairs inside a block cost 2.5 operations each per channel this way and no cross-lane sum;
// the matrix unit does the pairs across blocks, where decay factors into a row and a column part.

constexpr int W = Dk % 64 == 0 ? 64 : 32;
constexpr int ROW = W + 2;   // staged rows: 8 ROW is half a turn of the banks
constexpr int MROW = W + 8;  // rows read as 8 x 8 tiles
constexpr int PART = 17;     // 16 partial sums and one word against bank conflicts
typedef vec<OpT, 4> Op4;

// The rows of a slab, and after the last one the partial sums of the diagonal blocks.
threadgroup float stage[3 * 16 * 66 + 3 * 8 * 72];
threadgroup float block_decay[2 * W];
threadgroup float across[4 * 2 * KDA_TILE];
threadgroup float below[2 * KDA_TILE];   // beta_i N_ij of the diagonal blocks
threadgroup float corner[KDA_TILE];      // beta_i N_ij across
threadgroup float inverse[3 * KDA_TILE];
threadgroup float beta_s[KDA_CHUNK];

threadgroup float* k_s = stage;
threadgroup float* q_s = k_s + 16 * ROW;
threadgroup float* a_s = q_s + 16 * ROW;
threadgroup float* k_prefix = a_s + 16 * ROW;
threadgroup float* q_prefix = k_prefix + 8 * MROW;
threadgroup float* k_suffix = q_prefix + 8 * MROW;

const int T = dims[0];
const int H = dims[1];
const int Hv = dims[2];
const int start = dims[3];
const int chunks = dims[4];

const int tid = int(thread_position_in_threadgroup.x);
const int sg = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int chunk = int(threadgroup_position_in_grid.x);
const int head = int(threadgroup_position_in_grid.y);
const int b = head / Hv;
const int hv = head % Hv;
const int h = hv / (Hv / H);
const int first = start + chunk * KDA_CHUNK;
const int valid = clamp(min(int(lengths[b]), T) - first, 0, int(KDA_CHUNK));

const float scale = params[0];
const float bound = params[1];
const bool raw = GATE == KDA_GATE_SOFTPLUS || GATE == KDA_GATE_BOUNDED;
const float rate = raw ? metal::precise::exp(float(A_log[hv])) : 1.0f;
const size_t place = size_t(head) * chunks + chunk;

if (tid < KDA_CHUNK) {
  beta_s[tid] =
      tid < valid ? kda_beta<BETA>(float(beta[(size_t(b) * T + first + tid) * Hv + hv])) : 0.0f;
}

float n_left[8];   // column sg: N_(sg+s),sg at s
float m_left[8];
float n_right[4];  // column 7-sg
float m_right[4];
KDA_UNROLL
for (int s = 0; s < 8; ++s) {
  n_left[s] = 0.0f;
  m_left[s] = 0.0f;
}
KDA_UNROLL
for (int s = 0; s < 4; ++s) {
  n_right[s] = 0.0f;
  m_right[s] = 0.0f;
}
simdgroup_float8x8 n_across = make_filled_simdgroup_matrix<float, 8>(0.0f);
simdgroup_float8x8 m_across = make_filled_simdgroup_matrix<float, 8>(0.0f);

for (int base = 0; base < Dk; base += W) {
  const int c = tid % W;
  const int block = tid / W;  // 2 and 3 are idle where W is 32
  float k_c[8];
  float q_c[8];
  float g_c[8];
  float prefix[8];
  float suffix[8];
  if (block < 2) {
    const int channel = base + c;
    const float bias = raw ? float(dt_bias[hv * Dk + channel]) : 0.0f;
    // Without a branch, so that all loads are in flight at once; what is past the end is not used.
    KDA_UNROLL
    for (int i = 0; i < 8; ++i) {
      const size_t at = size_t(b) * T + first + clamp(block * 8 + i, 0, max(valid - 1, 0));
      k_c[i] = float(k[(at * H + h) * Dk + channel]);
      q_c[i] = float(q[(at * H + h) * Dk + channel]);
      g_c[i] = 0.0f;
      if (GATE == KDA_GATE_HEAD) {
        g_c[i] = float(g[at * Hv + hv]);
      } else if (GATE != KDA_GATE_NONE) {
        g_c[i] = float(g[(at * Hv + hv) * Dk + channel]);
      }
    }
    float product = 1.0f;
    KDA_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int t = block * 8 + i;
      const float given = kda_decay<GATE>(g_c[i], rate, bias, bound);
      const float decay_t = t < valid ? given : 1.0f;
      k_c[i] = t < valid ? k_c[i] : 0.0f;
      q_c[i] = t < valid ? scale * q_c[i] : 0.0f;
      product *= decay_t;
      prefix[i] = product;
      suffix[i] = decay_t;
      k_s[t * ROW + c] = k_c[i];
      q_s[t * ROW + c] = q_c[i];
      a_s[t * ROW + c] = decay_t;
    }
    block_decay[block * W + c] = product;
    product = 1.0f;
    KDA_UNROLL
    for (int i = 7; i >= 0; --i) {
      const float decay_t = suffix[i];
      suffix[i] = product;
      product *= decay_t;
    }
    KDA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (block == 0) {
        k_suffix[i * MROW + c] = k_c[i] * suffix[i];
      } else {
        k_prefix[i * MROW + c] = k_c[i] * prefix[i];
        q_prefix[i * MROW + c] = q_c[i] * prefix[i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (block < 2) {
    const int channel = base + c;
    const float other = block_decay[(1 - block) * W + c];
    const float before = block == 0 ? 1.0f : other;
    const float after = block == 0 ? other : 1.0f;
    const int slab = channel / KDA_SLAB;
    const int eighth = channel % KDA_SLAB / 8;
    const int at = channel % 8 * 8;
    device Op4* kq_at = (device Op4*)(kq + (place * (Dk / KDA_SLAB) + slab) * KDA_KQ_SLAB +
                                      (eighth * 4 + block) * KDA_TILE + at);
    device float4* kh_at = (device float4*)(kh + (place * (Dk / KDA_SLAB) + slab) * KDA_KH_SLAB +
                                      (eighth * 2 + block) * KDA_TILE + at);
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      Op4 k_before = Op4(0);
      Op4 q_before = Op4(0);
      float4 k_after = float4(0.0f);
      KDA_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int t = 4 * i + j;
        k_before[j] = static_cast<OpT>(DELTA_RULE ? k_c[t] * prefix[t] * before : 0.0f);
        q_before[j] = static_cast<OpT>(q_c[t] * prefix[t] * before);
        k_after[j] = k_c[t] * suffix[t] * after;
      }
      kq_at[i] = k_before;
      kq_at[2 * KDA_TILE / 4 + i] = q_before;
      kh_at[i] = k_after;
    }
    if (block == 0) {
      decay[place * Dk + channel] = prefix[7] * other;
    }
  }

  const int from = lane / 16 * 8 * ROW;
  for (int c16 = lane % 16; c16 < W; c16 += 16) {
    threadgroup const float* kc = k_s + from + c16;
    threadgroup const float* qc = q_s + from + c16;
    threadgroup const float* ac = a_s + from + c16;
    float w = kc[sg * ROW];
    m_left[0] = fma(qc[sg * ROW], w, m_left[0]);
    KDA_UNROLL
    for (int s = 1; s < 8; ++s) {
      if (sg + s < 8) {
        w *= ac[(sg + s) * ROW];
        n_left[s] = fma(kc[(sg + s) * ROW], w, n_left[s]);
        m_left[s] = fma(qc[(sg + s) * ROW], w, m_left[s]);
      }
    }
    w = kc[(7 - sg) * ROW];
    m_right[0] = fma(qc[(7 - sg) * ROW], w, m_right[0]);
    KDA_UNROLL
    for (int s = 1; s < 4; ++s) {
      if (s <= sg) {
        w *= ac[(7 - sg + s) * ROW];
        n_right[s] = fma(kc[(7 - sg + s) * ROW], w, n_right[s]);
        m_right[s] = fma(qc[(7 - sg + s) * ROW], w, m_right[s]);
      }
    }
  }

  for (int tile = sg; tile < W / 8; tile += 4) {
    simdgroup_float8x8 rows;
    simdgroup_float8x8 columns;
    simdgroup_load(columns, k_suffix + tile * 8, MROW, ulong2(0, 0), true);
    simdgroup_load(rows, k_prefix + tile * 8, MROW);
    simdgroup_multiply_accumulate(n_across, rows, columns, n_across);
    simdgroup_load(rows, q_prefix + tile * 8, MROW);
    simdgroup_multiply_accumulate(m_across, rows, columns, m_across);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Sums over lanes and SIMD-groups. An entry (matrix, block, i, j) has PART words in `stage`.
{
  const int slice = lane % 16;
  const int entry = lane / 16 * KDA_TILE;
  KDA_UNROLL
  for (int s = 0; s < 8; ++s) {
    if (sg + s < 8) {
      const int at = entry + (sg + s) * 8 + sg;
      stage[at * PART + slice] = n_left[s];
      stage[(at + 2 * KDA_TILE) * PART + slice] = m_left[s];
    }
  }
  KDA_UNROLL
  for (int s = 0; s < 4; ++s) {
    if (s <= sg) {
      const int at = entry + (7 - sg + s) * 8 + 7 - sg;
      stage[at * PART + slice] = n_right[s];
      stage[(at + 2 * KDA_TILE) * PART + slice] = m_right[s];
    }
  }
  simdgroup_store(n_across, across + sg * 2 * KDA_TILE, 8);
  simdgroup_store(m_across, across + (sg * 2 + 1) * KDA_TILE, 8);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
{
  const int block = tid / KDA_TILE;
  const int entry = tid % KDA_TILE;
  const int i = entry / 8;
  const int j = entry % 8;
  device float* tri_at = tri + place * KDA_TRI;
  float n = 0.0f;
  float m = 0.0f;
  if (i >= j) {
    n = kda_sum16(stage + tid * PART);
    m = kda_sum16(stage + (tid + 2 * KDA_TILE) * PART);
  }
  below[tid] = DELTA_RULE && i > j ? beta_s[block * 8 + i] * n : 0.0f;
  tri_at[(3 + 2 * block) * KDA_TILE + entry] = m;
  const int at = block * KDA_TILE + entry;
  const float sum = (across[at] + across[2 * KDA_TILE + at]) +
      (across[4 * KDA_TILE + at] + across[6 * KDA_TILE + at]);
  if (block == 0) {
    corner[entry] = DELTA_RULE ? beta_s[8 + i] * sum : 0.0f;
  } else {
    tri_at[4 * KDA_TILE + entry] = sum;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

if (tid < KDA_CHUNK) {
  // Thread = one column of the inverse: x_i = [i = column] - sum_(m < i) A_im x_m in its own block;
  // a column of block 0 continues through the rows of block 1, as y.
  const int block = tid / 8;
  const int column = tid % 8;
  float x[8];
  KDA_UNROLL
  for (int i = 0; i < 8; ++i) {
    float sum = 0.0f;
    KDA_UNROLL
    for (int m = 0; m < 8; ++m) {
      if (m < i) {  // constant bounds, so that x stays in registers
        sum = fma(below[block * KDA_TILE + i * 8 + m], x[m], sum);
      }
    }
    x[i] = (i == column ? 1.0f : 0.0f) - sum;
    inverse[2 * block * KDA_TILE + i * 8 + column] = x[i];
  }
  if (block == 0) {
    float y[8];
    KDA_UNROLL
    for (int i = 0; i < 8; ++i) {
      float sum = 0.0f;
      KDA_UNROLL
      for (int m = 0; m < 8; ++m) {
        sum = fma(corner[i * 8 + m], x[m], sum);
      }
      KDA_UNROLL
      for (int m = 0; m < 8; ++m) {
        if (m < i) {
          sum = fma(below[KDA_TILE + i * 8 + m], y[m], sum);
        }
      }
      y[i] = -sum;
      inverse[KDA_TILE + i * 8 + column] = y[i];
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = tid; i < 3 * KDA_TILE; i += 128) {
  tri[place * KDA_TRI + i] = inverse[i] * beta_s[i / (2 * KDA_TILE) * 8 + i % 8];
}
