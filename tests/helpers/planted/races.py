"""Races in threadgroup and device memory."""

from .case import Case

CASES = {
    "missing barrier between write and read": Case(
        "race",
        """
          threadgroup float s[64];
          uint l = thread_position_in_threadgroup.x;
          s[l] = a[thread_position_in_grid.x];
        - simdgroup_barrier(mem_flags::mem_threadgroup);
        + threadgroup_barrier(mem_flags::mem_threadgroup);
          float x = s[63 - l] + s[l];  // FAULT
          threadgroup_barrier(mem_flags::mem_threadgroup);
          s[l] = x;
          out[thread_position_in_grid.x] = x;
        """,
    ),
    "missing barrier between read and next write": Case(
        "race",
        """
          threadgroup float s[64];
          uint l = thread_position_in_threadgroup.x;
          s[l] = a[thread_position_in_grid.x];
          threadgroup_barrier(mem_flags::mem_threadgroup);
          float x = s[63 - l];  // FAULT
        + threadgroup_barrier(mem_flags::mem_threadgroup);
          s[l] = x + 1;  // FAULT
          out[thread_position_in_grid.x] = x;
        """,
    ),
    "two threads write one place": Case(
        "race",
        """
          threadgroup float s[32];
          uint l = thread_position_in_threadgroup.x;
        - s[l / 2] = a[thread_position_in_grid.x];  // FAULT
        + if (l % 2 == 0) s[l / 2] = a[thread_position_in_grid.x];
          threadgroup_barrier(mem_flags::mem_threadgroup);
          out[thread_position_in_grid.x] = s[l / 2];
        """,
    ),
    "a barrier for the other memory": Case(
        "race",
        """
          threadgroup float s[64];
          uint l = thread_position_in_threadgroup.x;
          s[l] = a[thread_position_in_grid.x];
        - threadgroup_barrier(mem_flags::mem_device);
        + threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
          float x = s[63 - l];  // FAULT
          out[thread_position_in_grid.x] = x;
        """,
    ),
    "missing simdgroup_barrier": Case(
        "race",
        """
          threadgroup float s[64];
          uint l = thread_position_in_threadgroup.x;
          s[l] = a[thread_position_in_grid.x];
        + simdgroup_barrier(mem_flags::mem_threadgroup);
          float x = s[l ^ 1];  // FAULT
          out[thread_position_in_grid.x] = x;
        """,
    ),
    "matrix stored and loaded with no barrier": Case(
        "race",
        """
          threadgroup float s[64];
          simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(2.0f), t;
          simdgroup_store(m, s, 8);
        + simdgroup_barrier(mem_flags::mem_threadgroup);
          simdgroup_load(t, s, 8, ulong2(0, 0), true);  // FAULT
          simdgroup_store(t, out + 64 * threadgroup_position_in_grid.x, 8);
        """,
        group=32,
        grid=64,
    ),
    "two threadgroups write one output": Case(
        "race",
        """
          uint i = thread_position_in_grid.x;
          out[i] = a[i];  // FAULT
        - if (thread_position_in_threadgroup.x == 0)
        -   out[7] = i;  // FAULT
        + if (i == 7)
        +   out[7] = i + 1;
        """,
    ),
    "a threadgroup reads what another wrote": Case(
        "race",
        """
          uint i = thread_position_in_grid.x;
          out[i] = a[i];
          if (i == 64)
        -   out[i] = out[0] + 1;  // FAULT
        +   out[i] = out[i] + 1;
        """,
    ),
    "threads of a group exchange through device memory": Case(
        "race",
        """
          uint i = thread_position_in_grid.x;
          out[i] = a[i];
        - threadgroup_barrier(mem_flags::mem_threadgroup);
        + threadgroup_barrier(mem_flags::mem_device);
          float x = out[i ^ 33];  // FAULT
          threadgroup_barrier(mem_flags::mem_device);
          out[i] = x;
        """,
    ),
}
