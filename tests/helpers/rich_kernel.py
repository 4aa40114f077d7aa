"""A right kernel that uses most of Metal, for the front-end check and for CUDA."""

HEADER = """
template <typename T>
inline T helper(const threadgroup T* p) {
  return p[0] > 0 ? p[1] : T(0);
}
"""
SOURCE = """
    threadgroup float s[64], tile[8][9];
    threadgroup half4 packed;
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
    s[l] = float(a[i]) * 2.0f;
    if (l == 0) packed = half4(1.0h, half(0.5f), half2(0.0h));
    tile[l % 8][l % 9] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const auto first = small;
    float x = simd_sum(s[63 - l]) + first[0] + scalar + tile[0][0] + float(a_shape[0]);
    x += simd_shuffle_xor(x, 1) + simd_prefix_exclusive_sum(x) + quad_sum(x);
    float4 v = float4(x, 1.0f, float2(x, x));
    v.xy = v.yx + v.zw;
    simdgroup_float8x8 m, n = make_filled_simdgroup_matrix<float, 8>(1.0f);
    simdgroup_load(m, s, 8);
    simdgroup_multiply_accumulate(m, m, n, m);
    m.thread_elements()[0] += metal::fast::exp(x);
    simdgroup_store(m, s, 8);
    x += helper(s) + dot(v, v) + clamp(x, 0.0f, 1.0f) + as_type<float>(as_type<uint>(x));
    if (ulong(simd_ballot(x > 2.0f)) == 1) x += 1.0f;
    if (simd_any(x > 3.0f) && popcount(i) < 3) x = rsqrt(max(x, 1.0f));
    if (N > 2) out[i] = T(x + float(packed.x));
"""
