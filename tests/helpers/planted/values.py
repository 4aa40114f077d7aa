"""Memory that nobody wrote, limits of Metal, and text that is not Metal."""

import mlx.core as mx

from .case import Case

CASES = {
    "threadgroup memory read before it is written": Case(
        "uninitialised",
        """
          threadgroup float s[64];
          uint l = thread_position_in_threadgroup.x;
        - if (l != 5) s[l] = l;
        + s[l] = l;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          out[thread_position_in_grid.x] = s[63 - l];  // FAULT
        """,
    ),
    "threadgroup memory does not outlive its threadgroup": Case(
        "uninitialised",
        """
          threadgroup float s[64];
          uint l = thread_position_in_threadgroup.x;
        - if (threadgroup_position_in_grid.x == 0) s[l] = l;
        + s[l] = l;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          out[thread_position_in_grid.x] = s[l];  // FAULT
        """,
    ),
    "adding to an output nobody initialised": Case(
        "uninitialised",
        """
          uint i = thread_position_in_grid.x;
        + out[i] = a[i];
          out[i] += a[i];  // FAULT
        """,
    ),
    "an output left out": Case(
        "unwritten-output",
        """
          uint i = thread_position_in_grid.x;
        - if (i != 100) out[i] = a[i];
        + out[i] = a[i];
        """,
    ),
    "half an output left out": Case(
        "unwritten-output",
        """
          uint i = thread_position_in_grid.x;
        - if (i % 2) out[i] = half(a[i]);
        + out[i] = half(a[i]);
        """,
        out_dtype=mx.float16,
    ),
    "40,192 bytes of threadgroup memory": Case(
        "limits",
        """
        - threadgroup float s[10048];  // FAULT
        + threadgroup float s[8192];
          uint l = thread_position_in_threadgroup.x;
          s[l] = l;
          out[thread_position_in_grid.x] = s[l];
        """,
    ),
    "2,048 threads": Case(
        "limits",
        """
        - out[thread_position_in_grid.x] = 1;
        + out[thread_position_in_grid.x % 128] = 1;
        """,
        group=2048,
        grid=2048,
        size=2048,
    ),
    "text that is not ASCII": Case(
        "limits",
        """
        - out[thread_position_in_grid.x] = 1;  // caf\u00e9 FAULT
        + out[thread_position_in_grid.x] = 1;  // cafe
        """,
    ),
    "a function Metal does not have": Case(
        "unsupported",
        """
          uint i = thread_position_in_grid.x;
        - out[i] = frobnicate(a[i]);  // FAULT
        + out[i] = exp(a[i] * 0);
        """,
    ),
    "an integer division by zero": Case(
        "unsupported",
        """
          uint i = thread_position_in_grid.x;
        - int zero = int(small[0]) - 1;
        - out[i] = int(a[i]) / zero;  // FAULT
        + int one = int(small[0]);
        + out[i] = int(a[i]) / one;
        """,
    ),
    "double": Case(
        "unsupported",
        """
          uint i = thread_position_in_grid.x;
        - double x = a[i];  // FAULT
        + float x = a[i];
          out[i] = x;
        """,
    ),
    "a threadgroup variable with an initialiser": Case(
        "unsupported",
        """
        - threadgroup float s = 1.0f;  // FAULT
        + threadgroup float s;
        + if (thread_position_in_threadgroup.x == 0) s = 1.0f;
        + threadgroup_barrier(mem_flags::mem_threadgroup);
          out[thread_position_in_grid.x] = s;
        """,
    ),
    "an implicit conversion to bfloat": Case(
        "unsupported",
        """
          uint i = thread_position_in_grid.x;
        - bfloat b = a[i];  // FAULT
        + bfloat b = bfloat(a[i]);
          out[i] = b;
        """,
    ),
}
