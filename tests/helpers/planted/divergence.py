"""Barriers and SIMD operations that some threads do not reach."""

from .case import Case

CASES = {
    "barrier in a branch": Case(
        "divergence",
        """
          uint l = thread_position_in_threadgroup.x;
        - if (l < 32) {
        -   threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT
        - }
        + threadgroup_barrier(mem_flags::mem_threadgroup);
          out[thread_position_in_grid.x] = l;
        """,
    ),
    "return above a barrier": Case(
        "divergence",
        """
          uint i = thread_position_in_grid.x;
          out[i] = a[i];
        + threadgroup_barrier(mem_flags::mem_threadgroup);
          if (i >= 100) return;
        - threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT
          out[i] = 2;
        """,
    ),
    "threads at different barriers": Case(
        "divergence",
        """
          uint l = thread_position_in_threadgroup.x;
        - if (l < 32)
        -   threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT
        - else
        -   threadgroup_barrier(mem_flags::mem_threadgroup);
        + threadgroup_barrier(mem_flags::mem_threadgroup);
          out[thread_position_in_grid.x] = l;
        """,
    ),
    "SIMD sum in a branch": Case(
        "divergence",
        """
          uint i = thread_position_in_grid.x;
        - float x = a[i];
        - if (thread_index_in_simdgroup < 16)
        -   x = simd_sum(x);  // FAULT
        + float x = simd_sum(a[i]);
          out[i] = x;
        """,
    ),
    "different SIMD operations": Case(
        "divergence",
        """
          uint i = thread_position_in_grid.x;
        - float x = a[i];
        - if (thread_index_in_simdgroup < 16)
        -   x = simd_sum(x);
        - else
        -   x = simd_max(x);  // FAULT
        + float x = simd_sum(a[i]);
          out[i] = x;
        """,
    ),
    "the same SIMD operation twice on one line": Case(
        "divergence",
        """
          uint i = thread_position_in_grid.x;
        - float x = a[i];
        - x = thread_index_in_simdgroup < 16 ? simd_sum(x) : simd_sum(2 * x);  // FAULT
        + float x = simd_sum(a[i]) + simd_sum(a[i]) * simd_sum(x = 1);
          out[i] = x;
        """,
    ),
    "some lanes loop longer": Case(
        "divergence",
        """
          uint i = thread_position_in_grid.x;
          float x = a[i];
        - for (uint k = 0; k < 2 + i % 2; ++k)
        + for (uint k = 0; k < 3; ++k)
            x = simd_sum(x);  // FAULT
          out[i] = x;
        """,
    ),
    "matrix product in a branch": Case(
        "divergence",
        """
          simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(2.0f);
        - if (thread_index_in_simdgroup > 3)
        -   simdgroup_multiply(m, m, m);  // FAULT
        + simdgroup_multiply(m, m, m);
          simdgroup_store(m, out + 64 * threadgroup_position_in_grid.x, 8);
        """,
        group=32,
        grid=64,
    ),
}
