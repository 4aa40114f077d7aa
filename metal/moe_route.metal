// moe_route: which experts a token goes to and with what weight, in one launch.
//
//   score_e = sigmoid(logit_e) or softmax(logit)_e       choice_e = score_e + bias_e
//   only the KEPT of GROUPS groups whose two best choices sum highest take part (if GROUPS > KEPT)
//   chosen = the K highest choices, highest first;  weight = score / sum of the chosen, times scale
//
// Inputs   logits [tokens,E] float  bias [E] float  params [scale] float
// Outputs  chosen [tokens,K] uint  weights [tokens,K] OutT
// Template E, K, GROUPS, KEPT, SOFTMAX, NORM (renormalise), OutT
//
// Thread map: a SIMD-group per token, expert = 32 i + lane; grid (32, tokens), threadgroup (32).
// Threadgroup bytes: 4 (E + GROUPS), at most 4,224.
// Order of reductions: softmax and the best choice: a lane over its experts, then simd_sum or
// simd_max; the sum of the weights from the highest choice down. Of equal choices the lower expert
// goes first.
// Why: otherwise seven launches on a few hundred values each, 26 times per decode step.

constexpr int MINE = (E + 31) / 32;  // experts per lane
constexpr int SIZE = E / GROUPS;     // experts per group
// Not infinity, which a fast-math compiler may take to be impossible.
const float LOWEST = -3.4e38f;

threadgroup float choice_s[E];
threadgroup float group_s[GROUPS];

const int lane = int(thread_index_in_simdgroup);
const size_t token = threadgroup_position_in_grid.y;
const device float* logit = logits + token * E;

float score[MINE];
float choice[MINE];
float top = LOWEST;
KDA_UNROLL
for (int i = 0; i < MINE; ++i) {
  const int e = 32 * i + lane;
  score[i] = e < E ? logit[e] : LOWEST;
  top = max(top, score[i]);
}
if (SOFTMAX) {
  top = simd_max(top);
  float sum = 0.0f;
  KDA_UNROLL
  for (int i = 0; i < MINE; ++i) {
    score[i] = 32 * i + lane < E ? exp(score[i] - top) : 0.0f;
    sum += score[i];
  }
  sum = simd_sum(sum);
  KDA_UNROLL
  for (int i = 0; i < MINE; ++i) {
    score[i] = score[i] / sum;
  }
} else {
  KDA_UNROLL
  for (int i = 0; i < MINE; ++i) {
    score[i] = 32 * i + lane < E ? kda_sigmoid(score[i]) : 0.0f;
  }
}
KDA_UNROLL
for (int i = 0; i < MINE; ++i) {
  const int e = 32 * i + lane;
  choice[i] = LOWEST;
  if (e < E) {
    choice[i] = score[i] + bias[e];
    choice_s[e] = choice[i];
  }
}

if (GROUPS > KEPT) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int g = lane; g < GROUPS; g += 32) {
    float first = LOWEST;
    float second = LOWEST;
    for (int e = g * SIZE; e < (g + 1) * SIZE; ++e) {
      const float x = choice_s[e];
      second = max(second, min(first, x));
      first = max(first, x);
    }
    group_s[g] = SIZE > 1 ? first + second : first;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  KDA_UNROLL
  for (int i = 0; i < MINE; ++i) {
    const int e = 32 * i + lane;
    if (e < E) {
      const int mine = e / SIZE;
      int better = 0;  // groups that rank before this expert's
      for (int g = 0; g < GROUPS; ++g) {
        better += group_s[g] > group_s[mine] || (group_s[g] == group_s[mine] && g < mine) ? 1 : 0;
      }
      if (better >= KEPT) {
        choice[i] = LOWEST;
      }
    }
  }
}

float total = 0.0f;
float weight = 0.0f;  // lane j keeps the j-th
uint expert = 0;
for (int j = 0; j < K; ++j) {
  float best = LOWEST;
  float of_best = 0.0f;
  int at = E;
  KDA_UNROLL
  for (int i = 0; i < MINE; ++i) {
    const int e = 32 * i + lane;
    if (e < E && choice[i] > best) {
      best = choice[i];
      of_best = score[i];
      at = e;
    }
  }
  const float highest = simd_max(best);
  const int winner = simd_min(best == highest ? at : int(E));
  const float its = simd_sum(at == winner ? of_best : 0.0f);
  if (winner % 32 == lane) {
    KDA_UNROLL
    for (int i = 0; i < MINE; ++i) {
      if (32 * i + lane == winner) {
        choice[i] = LOWEST;
      }
    }
  }
  total += its;
  if (lane == j) {
    weight = its;
    expert = uint(min(winner, int(E) - 1));  // NaN beats nothing: no expert beyond the last
  }
}
if (lane < K) {
  const float share = NORM ? weight / (total + 1e-20f) : weight;
  chosen[token * K + lane] = expert;
  weights[token * K + lane] = static_cast<OutT>(share * params[0]);
}
