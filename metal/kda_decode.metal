// kda_decode: a KDA layer between its projections, for T <= 8 tokens: short convolution and SiLU,
// L2 norms, gate, write strength, recurrence, gated RMSNorm.
//
//   x_t = silu(sum_j w_j x~_(t-CONV_KERNEL+1+j))   over the window and new tokens, for q, k and v
//   q, k <- x / sqrt(sum x^2 + 1e-6)        S <- S * a_t;  e = beta_t (v_t - S k_t)
//   S <- S + e k_t^T;  o_t = S (scale q_t)  y_t = o_t / sqrt(mean o_t^2 + eps) * weight * sigmoid(z)
//
// Inputs   q, k [B,T,H*Dk]  v [B,T,Hv*Dv]: projections, before the convolution
//          q_window, k_window, v_window [B,CONV_KERNEL-1,...]: the tokens before
//          q_conv_weight, k_conv_weight, v_conv_weight [channels,CONV_KERNEL]
//          g, A_log, dt_bias, beta (see kda_common.h)
//          z [B,T,Hv,Dv]: output gate  weight [Dv]  state [B,Hv,Dv,Dk] float  lengths [>=B] int
//          dims [T, H, Hv] int  params [scale, bound, eps] float
// Outputs  y [B,T,Hv,Dv]; state_out [B,KEEP ? T : 1,Hv,Dv,Dk], with KEEP the state after each
//          token; windows after the valid tokens
//
// Thread map: a threadgroup of SG <= 8 SIMD-groups per batch row and value head, grid
// (32 * SG, B*Hv). A SIMD-group owns 8 value rows at a time, 4 lanes per row, Dk/4 state elements
// per lane, and takes Dv / (8 SG) such blocks with no barrier between them. Before that, a
// SIMD-group prepares one row (token; q, k, v or decay) at a time; after it, one output row.
// Threadgroup bytes: 4 TCAP (3 Dk + 2 Dv + 1): 20,512 at Dk = Dv = 128.
// Order of reductions: norms: a lane over its channels, then simd_sum; rows as kda_recurrent.
// Why: a decode step is bound by reading and writing the state once (2 x 64 KB per head), so its load
// is issued before anything else and all the rest of the layer hides behind it in one launch. 256
// threads, not 512: a lane needs more registers than 512 threads can have on every chip.

constexpr int TCAP = 3 * Dk + 2 * Dv <= 896 ? 8 : 4;
constexpr int FOURS = Dk / 16;
constexpr int BLOCKS = Dv / (8 * SG);
constexpr int THREADS = 32 * SG;

threadgroup float4 q_s[TCAP * Dk / 4];
threadgroup float4 k_s[TCAP * Dk / 4];
threadgroup float4 a_s[TCAP * Dk / 4];
threadgroup float v_s[TCAP * Dv];
threadgroup float o_s[TCAP * Dv];
threadgroup float beta_s[TCAP];

const int T = dims[0];
const int H = dims[1];
const int Hv = dims[2];
const int tid = int(thread_position_in_threadgroup.x);
const int lane = int(thread_index_in_simdgroup);
const int sg = int(simdgroup_index_in_threadgroup);
const int sub = lane & 3;
const int head = int(threadgroup_position_in_grid.y);
const int b = head / Hv;
const int hv = head % Hv;
const int h = hv / (Hv / H);
const int valid = clamp(int(lengths[b]), 0, T);

const int row0 = sg * 8 + lane / 4;
const size_t state_size = size_t(Dv) * Dk;
float4 S[FOURS];
KDA_UNROLL
for (int i = 0; i < FOURS; ++i) {
  S[i] = *(const device float4*)(state + head * state_size + row0 * Dk + 16 * i + 4 * sub);
}

const float scale = params[0];
const float bound = params[1];
const float eps = params[2];
const bool raw = GATE == KDA_GATE_SOFTPLUS || GATE == KDA_GATE_BOUNDED;
const float rate = raw ? metal::precise::exp(float(A_log[hv])) : 1.0f;

for (int item = sg; item < 4 * valid; item += SG) {
  const int t = item / 4;
  const int kind = item % 4;
  const size_t token = size_t(b) * T + t;
  if (kind < 2) {
    threadgroup float* to = (threadgroup float*)(kind == 0 ? q_s : k_s) + t * Dk;
    float sum = 0.0f;
    for (int i = lane; i < Dk; i += 32) {  // not unrolled: registers are full of state
      float x = 0.0f;
      if (kind == 0) {
        x = kda_conv_silu<CONV_KERNEL>(q, q_window, q_conv_weight, b, T, t, H * Dk, h * Dk + i);
      } else {
        x = kda_conv_silu<CONV_KERNEL>(k, k_window, k_conv_weight, b, T, t, H * Dk, h * Dk + i);
      }
      to[i] = x;
      sum = fma(x, x, sum);
    }
    const float norm = rsqrt(simd_sum(sum) + 1e-6f) * (kind == 0 ? scale : 1.0f);
    for (int i = lane; i < Dk; i += 32) {
      to[i] *= norm;
    }
  } else if (kind == 2) {
    for (int i = lane; i < Dv; i += 32) {
      v_s[t * Dv + i] =
          kda_conv_silu<CONV_KERNEL>(v, v_window, v_conv_weight, b, T, t, Hv * Dv, hv * Dv + i);
    }
  } else {
    for (int i = lane; i < Dk; i += 32) {
      float x = 0.0f;
      if (GATE == KDA_GATE_HEAD) {
        x = float(g[token * Hv + hv]);
      } else if (GATE != KDA_GATE_NONE) {
        x = float(g[(token * Hv + hv) * Dk + i]);
      }
      const float bias = raw ? float(dt_bias[hv * Dk + i]) : 0.0f;
      ((threadgroup float*)a_s)[t * Dk + i] = kda_decay<GATE>(x, rate, bias, bound);
    }
    if (lane == 0) {
      beta_s[t] = kda_beta<BETA>(float(beta[token * Hv + hv]));
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int block = 0; block < BLOCKS; ++block) {
  const int row = block * SG * 8 + row0;
  const size_t at_row = row * Dk + 4 * sub;
  if (block > 0) {
    KDA_UNROLL
    for (int i = 0; i < FOURS; ++i) {
      S[i] = *(const device float4*)(state + head * state_size + at_row + 16 * i);
    }
  }
  for (int t = 0; t < (KEEP ? T : valid); ++t) {
    if (t < valid) {
      const int at = t * (Dk / 4) + sub;
      float4 sum = float4(0.0f);
      KDA_UNROLL
      for (int i = 0; i < FOURS; ++i) {
        S[i] = S[i] * a_s[at + 4 * i];
        sum = fma(S[i], k_s[at + 4 * i], sum);
      }
      float predicted = (sum.x + sum.y) + (sum.z + sum.w);
      predicted += simd_shuffle_xor(predicted, 1);
      predicted += simd_shuffle_xor(predicted, 2);
      const float e = beta_s[t] * (v_s[t * Dv + row] - predicted);
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
        o_s[t * Dv + row] = out;
      }
    }
    if (KEEP) {
      const size_t slot = ((size_t(b) * T + t) * Hv + hv) * state_size;
      KDA_UNROLL
      for (int i = 0; i < FOURS; ++i) {
        *(device float4*)(state_out + slot + at_row + 16 * i) = S[i];
      }
    }
  }
  if (!KEEP) {
    KDA_UNROLL
    for (int i = 0; i < FOURS; ++i) {
      *(device float4*)(state_out + head * state_size + at_row + 16 * i) = S[i];
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int t = sg; t < T; t += SG) {
  const size_t at = ((size_t(b) * T + t) * Hv + hv) * Dv;
  if (t < valid) {
    float sum = 0.0f;
    for (int i = lane; i < Dv; i += 32) {
      sum = fma(o_s[t * Dv + i], o_s[t * Dv + i], sum);
    }
    const float norm = rsqrt(simd_sum(sum) / Dv + eps);
    for (int i = lane; i < Dv; i += 32) {
      const float gate = kda_sigmoid(float(z[at + i]));
      y[at + i] = static_cast<InT>(o_s[t * Dv + i] * norm * float(weight[i]) * gate);
    }
  } else {
    for (int i = lane; i < Dv; i += 32) {
      y[at + i] = static_cast<InT>(0.0f);
    }
  }
}

// The windows: of the tokens before and the valid new ones, the last CONV_KERNEL-1. Value heads that
// share a key head would write the same q and k windows: the first does.
if (hv % (Hv / H) == 0) {
  for (int i = tid; i < (CONV_KERNEL - 1) * Dk; i += THREADS) {
    const int row = i / Dk;
    const int channel = h * Dk + i % Dk;
    const size_t to = (size_t(b) * (CONV_KERNEL - 1) + row) * H * Dk + channel;
    q_window_out[to] = static_cast<InT>(
        kda_next_window<CONV_KERNEL>(q, q_window, b, T, valid, row, H * Dk, channel));
    k_window_out[to] = static_cast<InT>(
        kda_next_window<CONV_KERNEL>(k, k_window, b, T, valid, row, H * Dk, channel));
  }
}
for (int i = tid; i < (CONV_KERNEL - 1) * Dv; i += THREADS) {
  const int row = i / Dv;
  const int channel = hv * Dv + i % Dv;
  v_window_out[(size_t(b) * (CONV_KERNEL - 1) + row) * Hv * Dv + channel] = static_cast<InT>(
      kda_next_window<CONV_KERNEL>(v, v_window, b, T, valid, row, Hv * Dv, channel));
}
