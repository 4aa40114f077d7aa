// kda_epilogue: from the prefill kernels' output to a layer's output projection.
//
//   y = o / sqrt(mean o^2 + eps) * weight * sigmoid(z)
//
// Inputs   o, z [B,T,Hv,Dv]  weight [Dv]  lengths [>=B] int  dims [T, Hv, rows] int  params [eps]
// Outputs  y [B,T,Hv,Dv], 0 past a row's length
//
// Thread map: a SIMD-group per row of Dv, 4 rows per threadgroup; grid (32, 4 * ceil(rows / 4)) with
// rows = B * T * Hv.
// Threadgroup bytes: 0.
// Order of reductions: a lane over its channels, then simd_sum.
// Why: one read of o and z and one write; norm, sigmoid and product as operations pass a row through
// memory four times, or round it twice.

const int T = dims[0];
const int Hv = dims[1];
const int rows = dims[2];
const int lane = int(thread_index_in_simdgroup);
const int row = int(threadgroup_position_in_grid.y) * 4 + int(simdgroup_index_in_threadgroup);
if (row < rows) {
  const int token = row / Hv;
  const bool inside = token % T < int(lengths[token / T]);
  const size_t at = size_t(row) * Dv + lane;
  float x[Dv / 32];
  float sum = 0.0f;
  KDA_UNROLL
  for (int i = 0; i < Dv / 32; ++i) {
    x[i] = inside ? float(o[at + 32 * i]) : 0.0f;
    sum = fma(x[i], x[i], sum);
  }
  const float norm = rsqrt(simd_sum(sum) / Dv + params[0]);
  KDA_UNROLL
  for (int i = 0; i < Dv / 32; ++i) {
    const float gate = inside ? kda_sigmoid(float(z[at + 32 * i])) : 0.0f;
    y[at + 32 * i] = static_cast<InT>(x[i] * norm * float(weight[32 * i + lane]) * gate);
  }
}
