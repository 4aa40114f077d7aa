// Shared by the KDA kernels: what a gate and a write strength are, and how they are computed.
//
// All arithmetic is float32. Nothing here divides by a decay or takes its logarithm.

#if defined(__CUDACC__)
#define KDA_FUNC __device__ inline
#define KDA_UNROLL _Pragma("unroll")
#elif defined(__clang__)
#define KDA_FUNC inline
#define KDA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KDA_FUNC inline
#define KDA_UNROLL
#endif

// Template constant GATE: what the input `g` holds.
enum KdaGate {
  KDA_GATE_NONE = 0,      // nothing: no decay
  KDA_GATE_HEAD = 1,      // log decay, one value per head
  KDA_GATE_CHANNEL = 2,   // log decay, one value per channel
  KDA_GATE_SOFTPLUS = 3,  // raw gate a: g = -exp(A_log) softplus(a + dt_bias)
  KDA_GATE_BOUNDED = 4    // raw gate a: g = bound sigmoid(exp(A_log) (a + dt_bias))
};

// Template constant BETA: what the input `beta` holds.
enum KdaBeta {
  KDA_BETA_GIVEN = 0,  // the write strength itself
  KDA_BETA_SIGMOID = 1,  // b: beta = sigmoid(b)
  KDA_BETA_TWICE = 2     // b: beta = 2 sigmoid(b), negative eigenvalues allowed
};

// exp(-|x|) is at most 1, so neither branch overflows.
KDA_FUNC float kda_sigmoid(float x) {
  const float e = metal::precise::exp(-fabs(x));
  const float s = 1.0f / (1.0f + e);
  return x < 0.0f ? e * s : s;
}

// log(1 + x) for 0 <= x <= 1 as 2 atanh(x / (2 + x)), s <= 1/3: no cancellation for tiny x (a slow
// decay must not round to none), and nothing that a fast-math compiler could simplify away.
KDA_FUNC float kda_log1p(float x) {
  const float s = x / (2.0f + x);
  const float z = s * s;
  float p = 1.0f / 15.0f;
  p = fma(p, z, 1.0f / 13.0f);
  p = fma(p, z, 1.0f / 11.0f);
  p = fma(p, z, 1.0f / 9.0f);
  p = fma(p, z, 1.0f / 7.0f);
  p = fma(p, z, 1.0f / 5.0f);
  p = fma(p, z, 1.0f / 3.0f);
  return 2.0f * fma(p * z, s, s);
}

KDA_FUNC float kda_softplus(float x) {
  return max(x, 0.0f) + kda_log1p(metal::precise::exp(-fabs(x)));
}

// The decay of one channel and token. `rate` is exp(A_log) of the head; only raw gates use it, the
// bias and the bound.
template <int GATE>
KDA_FUNC float kda_decay(float x, float rate, float bias, float bound) {
  if (GATE == KDA_GATE_NONE) {
    return 1.0f;
  }
  float g = x;
  if (GATE == KDA_GATE_SOFTPLUS) {
    g = -rate * kda_softplus(x + bias);
  }
  if (GATE == KDA_GATE_BOUNDED) {
    g = bound * kda_sigmoid(rate * (x + bias));
  }
  return metal::precise::exp(g);
}

template <int BETA>
KDA_FUNC float kda_beta(float x) {
  if (BETA == KDA_BETA_GIVEN) {
    return x;
  }
  const float s = kda_sigmoid(x);
  return BETA == KDA_BETA_TWICE ? 2.0f * s : s;
}
