// kda_recurrent: the recurrence itself, token by token, in the order of the textbook.
//
//   S <- S * a_t;  e = beta_t (v_t - S k_t);  S <- S + e k_t^T;  o_t = S (scale q_t)
//
// For short inputs, and the reference of the chunked kernels on the same device.
//
// Inputs   q, k [B,T,H,Dk]  v [B,T,Hv,Dv]  g, A_log, dt_bias, beta (see kda_common.h)
//          state [B,Hv,Dv,Dk] float  lengths [>=B] int
//          dims [T, H, Hv, start, count] int  params [scale, bound] float
// Outputs  o [B,count,Hv,Dv]: tokens start .. start+count;  state_out [B,Hv,Dv,Dk]
//
// Thread map: a threadgroup of 4 SIMD-groups owns 32 value rows of one head; a SIMD-group owns 8
// rows, 4 lanes per row; a lane keeps Dk/4 state elements in registers, in fours: lane l of a row has
// the channels 16 i + 4 l .. + 3. Grid (128 * Dv/32, B*Hv).
// Threadgroup bytes: TB (3 Dk + 33) 4 with TB = 16 tokens (8 where Dk > 128): 26,688 at Dk = 128.
// Order of reductions: four partial sums per lane, added pairwise, then lanes xor 1, xor 2.
// Why: rows packed eight to a SIMD-group need 2 shuffles per sum instead of a 32-lane reduction, and
// k, q and a are read from memory (and exponentiated) once for 32 rows instead of once per row.

constexpr int ROWS = 32;
constexpr int TB = Dk > 128 ? 8 : 16;
constexpr int FOURS = Dk / 16;  // float4 per lane

threadgroup float4 k_s[TB * Dk / 4];
threadgroup float4 q_s[TB * Dk / 4];
threadgroup float4 a_s[TB * Dk / 4];
threadgroup float v_s[TB * ROWS];
threadgroup float beta_s[TB];

const int T = dims[0];
const int H = dims[1];
const int Hv = dims[2];
const int start = dims[3];
const int count = dims[4];

const int tid = int(thread_position_in_threadgroup.x);
const int lane = int(thread_index_in_simdgroup);
const int sub = lane & 3;
const int row = int(simdgroup_index_in_threadgroup) * 8 + lane / 4;
const int row0 = int(threadgroup_position_in_grid.x) * ROWS;
const int head = int(threadgroup_position_in_grid.y);
const int b = head / Hv;
const int hv = head % Hv;
const int h = hv / (Hv / H);
const int valid = clamp(int(lengths[b]) - start, 0, count);

const float scale = params[0];
const float bound = params[1];
const bool raw = GATE == KDA_GATE_SOFTPLUS || GATE == KDA_GATE_BOUNDED;
const float rate = raw ? metal::precise::exp(float(A_log[hv])) : 1.0f;

const size_t state_at = (size_t(head) * Dv + row0 + row) * Dk + 4 * sub;
float4 S[FOURS];
KDA_UNROLL
for (int i = 0; i < FOURS; ++i) {
  S[i] = *(const device float4*)(state + state_at + 16 * i);
}

for (int t0 = 0; t0 < valid; t0 += TB) {
  const int n = min(TB, valid - t0);
  const size_t first = size_t(b) * T + start + t0;
  for (int i = tid; i < n * Dk; i += 128) {
    const int t = i / Dk;
    const int c = i % Dk;
    const size_t qk = ((first + t) * H + h) * Dk + c;
    ((threadgroup float*)k_s)[i] = float(k[qk]);
    ((threadgroup float*)q_s)[i] = scale * float(q[qk]);
    const size_t token = (first + t) * Hv + hv;
    float x = 0.0f;
    if (GATE == KDA_GATE_HEAD) {
      x = float(g[token]);
    } else if (GATE != KDA_GATE_NONE) {
      x = float(g[token * Dk + c]);
    }
    const float bias = raw ? float(dt_bias[hv * Dk + c]) : 0.0f;
    ((threadgroup float*)a_s)[i] = kda_decay<GATE>(x, rate, bias, bound);
  }
  for (int i = tid; i < n * ROWS; i += 128) {
    v_s[i] = float(v[((first + i / ROWS) * Hv + hv) * Dv + row0 + i % ROWS]);
  }
  if (tid < n) {
    beta_s[tid] = kda_beta<BETA>(float(beta[(first + tid) * Hv + hv]));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int t = 0; t < n; ++t) {
    const int at = t * (Dk / 4) + sub;
    float4 sum = float4(0.0f);
    KDA_UNROLL
    for (int i = 0; i < FOURS; ++i) {
      if (GATE != KDA_GATE_NONE) {
        S[i] = S[i] * a_s[at + 4 * i];
      }
      if (DELTA_RULE) {
        sum = fma(S[i], k_s[at + 4 * i], sum);
      }
    }
    float predicted = (sum.x + sum.y) + (sum.z + sum.w);
    if (DELTA_RULE) {
      predicted += simd_shuffle_xor(predicted, 1);
      predicted += simd_shuffle_xor(predicted, 2);
    }
    const float e = beta_s[t] * (v_s[t * ROWS + row] - predicted);
    sum = float4(0.0f);
    KDA_UNROLL
    for (int i = 0; i < FOURS; ++i) {
      S[i] = fma(float4(e), k_s[at + 4 * i], S[i]);
      sum = fma(S[i], q_s[at + 4 * i], sum);
    }
    float out = (sum.x + sum.y) + (sum.z + sum.w);
    out += simd_shuffle_xor(out, 1);
    out += simd_shuffle_xor(out, 2);
    if (sub == 0) {
      o[((size_t(b) * count + t0 + t) * Hv + hv) * Dv + row0 + row] = static_cast<InT>(out);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

for (int i = valid * ROWS + tid; i < count * ROWS; i += 128) {
  o[((size_t(b) * count + i / ROWS) * Hv + hv) * Dv + row0 + i % ROWS] = static_cast<InT>(0.0f);
}
KDA_UNROLL
for (int i = 0; i < FOURS; ++i) {
  *(device float4*)(state_out + state_at + 16 * i) = S[i];
}
