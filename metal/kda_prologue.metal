// kda_prologue: from a layer's projections to its prefill kernels: short convolution and SiLU of q,
// k and v, L2 norm of q and k.
//
//   x_t = silu(sum_j w_j x~_(t-CONV_KERNEL+1+j))   over the window and the new tokens
//   q, k <- x / sqrt(sum x^2 + 1e-6)        per head
//
// Inputs   q, k [B,T,H*Dk]  v [B,T,Hv*Dv]: projections
//          q_window, k_window, v_window [B,CONV_KERNEL-1,...]: the tokens before
//          q_conv_weight, k_conv_weight, v_conv_weight [channels,CONV_KERNEL]
//          lengths [>=B] int  dims [T, H, Hv] int
// Outputs  q_out, k_out [B,T,H,Dk]  v_out [B,T,Hv,Dv], 0 past a row's length
//          windows after the valid tokens
//
// Thread map: a threadgroup of 3 SIMD-groups (q, k, v) per batch row, head and 16 tokens; grid
// (96 * ceil(T / 16), B * Hv). A lane keeps the weights and the last inputs of its D/32 channels
// in registers while it walks the tokens. Value heads that share a key head: the first does q and k.
// Threadgroup bytes: 0.
// Order of reductions: a lane over its channels, then simd_sum.
// Why: as separate operations these pass a token's q, k and v through memory eight times; here
// each input is read once (19 rows for 16 tokens) and each output written once.

constexpr int TOKENS = 16;
const int T = dims[0];
const int H = dims[1];
const int Hv = dims[2];
const int lane = int(thread_index_in_simdgroup);
const int kind = int(simdgroup_index_in_threadgroup);
const int first = int(threadgroup_position_in_grid.x) * TOKENS;
const int head = int(threadgroup_position_in_grid.y);
const int b = head / Hv;
const int hv = head % Hv;
const int h = hv / (Hv / H);
const int valid = clamp(int(lengths[b]), 0, T);
const int last = min(first + TOKENS, T);
const bool leads = hv % (Hv / H) == 0;

if (kind == 0 && leads) {
  kda_conv_rows<CONV_KERNEL, Dk, true, InT>(
      q, q_window, q_conv_weight, q_out, b, T, first, last, valid, H, h, lane);
}
if (kind == 1 && leads) {
  kda_conv_rows<CONV_KERNEL, Dk, true, InT>(
      k, k_window, k_conv_weight, k_out, b, T, first, last, valid, H, h, lane);
}
if (kind == 2) {
  kda_conv_rows<CONV_KERNEL, Dv, false, InT>(
      v, v_window, v_conv_weight, v_out, b, T, first, last, valid, Hv, hv, lane);
}
if (first == 0) {
  for (int row = 0; row < CONV_KERNEL - 1; ++row) {
    if (kind < 2 && leads) {
      for (int c = h * Dk + lane; c < (h + 1) * Dk; c += 32) {
        const size_t to = (size_t(b) * (CONV_KERNEL - 1) + row) * H * Dk + c;
        if (kind == 0) {
          q_window_out[to] = static_cast<InT>(
              kda_next_window<CONV_KERNEL>(q, q_window, b, T, valid, row, H * Dk, c));
        } else {
          k_window_out[to] = static_cast<InT>(
              kda_next_window<CONV_KERNEL>(k, k_window, b, T, valid, row, H * Dk, c));
        }
      }
    }
    if (kind == 2) {
      for (int c = hv * Dv + lane; c < (hv + 1) * Dv; c += 32) {
        v_window_out[(size_t(b) * (CONV_KERNEL - 1) + row) * Hv * Dv + c] = static_cast<InT>(
            kda_next_window<CONV_KERNEL>(v, v_window, b, T, valid, row, Hv * Dv, c));
      }
    }
  }
}
