"""Accesses outside of a buffer, and writes into inputs."""

from .case import Case

CASES = {
    "read past an input": Case(
        "out-of-bounds",
        """
          uint i = thread_position_in_grid.x;
        - out[i] = a[i + 1];  // FAULT
        + out[i] = a[min(i + 1, 127u)];
        """,
    ),
    "read before an input": Case(
        "out-of-bounds",
        """
          int i = thread_position_in_grid.x;
        - out[i] = a[i - 1];  // FAULT
        + out[i] = a[max(i - 1, 0)];
        """,
    ),
    "read past a constant input": Case(
        "out-of-bounds",
        """
          uint i = thread_position_in_grid.x;
        - out[i] = a[i] + small[i % 4];  // FAULT
        + out[i] = a[i] + small[i % 3];
        """,
    ),
    "write past an output": Case(
        "out-of-bounds",
        """
          uint i = thread_position_in_grid.x;
          out[i] = a[i];
          if (i == 127)
        -   out[i + 1] = 0;  // FAULT
        +   out[i] = 0;
        """,
    ),
    "far outside every buffer": Case(
        "out-of-bounds",
        """
          uint i = thread_position_in_grid.x;
        - out[i] = a[i + (1ul << 44)];  // FAULT
        + out[i] = a[i];
        """,
    ),
    "write into an input": Case(
        "out-of-bounds",
        """
          uint i = thread_position_in_grid.x;
        - ((device float*)a)[i] = 1;  // FAULT
        - out[i] = 1;
        + out[i] = a[i];
        """,
    ),
    "past a threadgroup array": Case(
        "out-of-bounds",
        """
        - threadgroup float s[63];
        + threadgroup float s[64];
          uint l = thread_position_in_threadgroup.x;
          s[l] = a[thread_position_in_grid.x];  // FAULT
          threadgroup_barrier(mem_flags::mem_threadgroup);
          out[thread_position_in_grid.x] = s[l];
        """,
    ),
    "from one threadgroup array into the next": Case(
        "out-of-bounds",
        """
          threadgroup float s[64], t[64];
          uint l = thread_position_in_threadgroup.x;
          s[l] = t[l] = a[thread_position_in_grid.x];
          threadgroup_barrier(mem_flags::mem_threadgroup);
        - float x = s[l + 64];  // FAULT
        - out[thread_position_in_grid.x] = x + t[l];
        + out[thread_position_in_grid.x] = s[63 - l] + t[l];
        """,
    ),
    "vector load over the end": Case(
        "out-of-bounds",
        """
          uint i = thread_position_in_grid.x;
        - const device packed_float4* v = (const device packed_float4*)(a + i);
        + const device packed_float4* v = (const device packed_float4*)(a + min(i, 124u));
          out[i] = dot(float4(*v), float4(1.0f));  // FAULT
        """,
    ),
    "matrix load over the end": Case(
        "out-of-bounds",
        """
          simdgroup_float8x8 m;
        - simdgroup_load(m, a + 65, 8);  // FAULT
        + simdgroup_load(m, a + 64, 8);
          simdgroup_store(m, out + 64 * threadgroup_position_in_grid.x, 8);
        """,
        group=32,
        grid=64,
    ),
    "shuffle from a lane that is not there": Case(
        "out-of-bounds",
        """
          uint i = thread_position_in_grid.x;
        - out[i] = simd_shuffle(a[i], ushort(32));  // FAULT
        + out[i] = simd_shuffle(a[i], ushort(31));
        """,
    ),
}
