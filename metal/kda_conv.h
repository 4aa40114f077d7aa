// The short convolution and what surrounds it, shared by kda_decode and kda_prologue.
//
// x [B,T,channels] are the new tokens and window [B,CONV_KERNEL-1,channels] those before;
// conv_weight [channels,CONV_KERNEL], oldest first. Pointers keep their address space.

// Input of `channel`, `from` tokens after the first new one (negative: in the window).
template <int CONV_KERNEL, typename X, typename Window>
KDA_FUNC float kda_input(X x, Window window, int b, int T, int from, int channels, int channel) {
  if (from < 0) {
    return float(
        window[(size_t(b) * (CONV_KERNEL - 1) + (from + CONV_KERNEL - 1)) * channels + channel]);
  }
  return float(x[(size_t(b) * T + from) * channels + channel]);
}

// One channel of one token.
template <int CONV_KERNEL, typename X, typename Window, typename ConvWeight>
KDA_FUNC float kda_conv_silu(
    X x, Window window, ConvWeight conv_weight, int b, int T, int t, int channels, int channel) {
  float sum = 0.0f;
  KDA_UNROLL
  for (int j = 0; j < CONV_KERNEL; ++j) {
    const int from = t + j - (CONV_KERNEL - 1);
    const float input = kda_input<CONV_KERNEL>(x, window, b, T, from, channels, channel);
    sum = fma(float(conv_weight[channel * CONV_KERNEL + j]), input, sum);
  }
  return sum * kda_sigmoid(sum);
}

// The input of `channel` at row i of the window that follows `valid` new tokens.
template <int CONV_KERNEL, typename X, typename Window>
KDA_FUNC float kda_next_window(
    X x, Window window, int b, int T, int valid, int i, int channels, int channel) {
  return kda_input<CONV_KERNEL>(x, window, b, T, valid + i - (CONV_KERNEL - 1), channels, channel);
}

// Tokens first .. last of one head of D channels, by one SIMD-group: lane = channels 32 i + lane.
template <
    int CONV_KERNEL, int D, bool UNIT, typename InT, typename X, typename Window,
    typename ConvWeight>
KDA_FUNC void kda_conv_rows(
    X x, Window window, ConvWeight conv_weight, device InT* out, int b, int T, int first, int last,
    int valid, int heads, int head, int lane) {
  const int channels = heads * D;
  float weight[D / 32][CONV_KERNEL];
  float past[D / 32][CONV_KERNEL];
  KDA_UNROLL
  for (int i = 0; i < D / 32; ++i) {
    const int channel = head * D + 32 * i + lane;
    KDA_UNROLL
    for (int j = 0; j < CONV_KERNEL; ++j) {
      weight[i][j] = float(conv_weight[channel * CONV_KERNEL + j]);
      past[i][j] = 0.0f;
      if (j > 0 && first < valid) {
        past[i][j] =
            kda_input<CONV_KERNEL>(x, window, b, T, first + j - CONV_KERNEL, channels, channel);
      }
    }
  }
  for (int t = first; t < last; ++t) {
    float y[D / 32];
    float sum = 0.0f;
    KDA_UNROLL
    for (int i = 0; i < D / 32; ++i) {
      y[i] = 0.0f;
      if (t < valid) {
        KDA_UNROLL
        for (int j = 0; j + 1 < CONV_KERNEL; ++j) {
          past[i][j] = past[i][j + 1];
          y[i] = fma(weight[i][j], past[i][j], y[i]);
        }
        past[i][CONV_KERNEL - 1] =
            float(x[(size_t(b) * T + t) * channels + head * D + 32 * i + lane]);
        y[i] = fma(weight[i][CONV_KERNEL - 1], past[i][CONV_KERNEL - 1], y[i]);
        y[i] *= kda_sigmoid(y[i]);
      }
      sum = fma(y[i], y[i], sum);
    }
    const float norm = UNIT ? rsqrt(simd_sum(sum) + 1e-6f) : 1.0f;
    KDA_UNROLL
    for (int i = 0; i < D / 32; ++i) {
      out[((size_t(b) * T + t) * heads + head) * D + 32 * i + lane] =
          static_cast<InT>(y[i] * norm);
    }
  }
}
