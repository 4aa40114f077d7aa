// kda_chunk_scan: carries the state over the chunks that kda_chunk_prepare made ready.
//
//   R = V - K~ S^T     U = T R     O = Q~ S^T + M U     S <- S * P_16 + U^T K^
//
// Inputs   kq (OpT), kh, tri, decay (see kda_chunk.h)  v [B,T,Hv,Dv]  state [B,Hv,Dv,Dk] float
//          lengths [>=B] int  dims [T, Hv, start, count, chunks] int
// Outputs  o [B,count,Hv,Dv]: tokens start .. start+count;  state_out [B,Hv,Dv,Dk]
//
// Thread map: a threadgroup of 4 SIMD-groups owns 32 value columns of one head; a SIMD-group owns
// 8, with S^T as Dk/8 tiles [channel][column] in registers. Grid (128 * Dv/32, B*Hv).
// K~, Q~ and K^ pass through threadgroup memory, 32 channels at a time, in two buffers: the next
// slab is read from memory into registers, the current one used, then the next one written; one
// barrier a slab.
// Threadgroup bytes: 8,448 with float operands, 4,352 with half.
// Order of reductions: channels in tiles of 8 inside the matrix unit, even and odd tiles apart.
// Why: 102 matrix products per 16 tokens and 8 columns (64 for R and O, 3 for U, 3 for M U, 32 for
// S) and not one cross-lane sum. Four SIMD-groups share a slab, so memory is read Dv/32 times; Dv/32
// threadgroups a head still fill a large GPU. K~ and Q~ may be half: the recurrence corrects what an
// inexact K~ predicts. K^ stays float, as do S and all sums: its rounding would add up in S.

constexpr int SLABS = Dk / KDA_SLAB;
constexpr int KQ16 = KDA_KQ_SLAB * int(sizeof(OpT)) / 16;  // 16-byte pieces of a slab: 128 or 256
constexpr int KH16 = KDA_KH_SLAB * 4 / 16;                 // 128, one a thread
constexpr bool TWO = KQ16 > 128;                           // two pieces a thread

threadgroup float4 slabs[2 * KQ16];
threadgroup float decay_s[2 * KDA_SLAB];

const int T = dims[0];
const int Hv = dims[1];
const int start = dims[2];
const int count = dims[3];
const int chunks = dims[4];

const int tid = int(thread_position_in_threadgroup.x);
const int lane = int(thread_index_in_simdgroup);
const int head = int(threadgroup_position_in_grid.y);
const int b = head / Hv;
const int hv = head % Hv;
const int dv0 =
    int(threadgroup_position_in_grid.x) * 32 + int(simdgroup_index_in_threadgroup) * 8;
const int valid = clamp(int(lengths[b]) - start, 0, count);
// The two elements of an 8 x 8 tile that a lane holds: (fm, fn) and (fm, fn + 1).
const int fm = lane / 16 * 4 + lane / 2 % 4;
const int fn = lane / 8 % 2 * 4 + lane % 2 * 2;

const device float4* kq4 = (const device float4*)kq + size_t(head) * chunks * SLABS * KQ16;
const device float4* kh4 = (const device float4*)kh + size_t(head) * chunks * SLABS * KH16;

simdgroup_float8x8 S[Dk / 8];
const size_t state_at = (size_t(head) * Dv + dv0) * Dk;
KDA_UNROLL
for (int i = 0; i < Dk / 8; ++i) {
  simdgroup_load(S[i], state + state_at + 8 * i, Dk, ulong2(0, 0), true);
}
slabs[tid] = kq4[tid];
if (TWO) {
  slabs[tid + 128] = kq4[tid + 128];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int n = 0; n < chunks; ++n) {
  const device float* tri_at = tri + (size_t(head) * chunks + n) * KDA_TRI;
  const device float* decay_at = decay + (size_t(head) * chunks + n) * Dk;
  float v_c[4];
  KDA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int t = n * KDA_CHUNK + i / 2 * 8 + fm;
    v_c[i] = 0.0f;
    if (t < valid) {
      v_c[i] = float(v[((size_t(b) * T + start + t) * Hv + hv) * Dv + dv0 + fn + i % 2]);
    }
  }

  // Token blocks 0 and 1 over the even tiles of channels, then over the odd ones: shorter sums lose
  // fewer digits, and the matrix unit has eight independent chains.
  simdgroup_float8x8 R[4];
  simdgroup_float8x8 O[4];
  KDA_UNROLL
  for (int i = 0; i < 4; ++i) {
    R[i] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    O[i] = make_filled_simdgroup_matrix<float, 8>(0.0f);
  }
  KDA_UNROLL
  for (int s = 0; s < SLABS; ++s) {
    const bool last = s + 1 == SLABS;
    const float4 next0 = last ? kh4[tid] : kq4[(s + 1) * KQ16 + tid];
    const float4 next1 = last || !TWO ? float4(0.0f) : kq4[(s + 1) * KQ16 + 128 + tid];
    const float next_decay = last && tid < KDA_SLAB ? decay_at[tid] : 0.0f;
    threadgroup const OpT* slab = (threadgroup const OpT*)(slabs + s % 2 * KQ16);
    KDA_UNROLL
    for (int i = 0; i < KDA_SLAB / 8; ++i) {
      simdgroup_matrix<OpT, 8, 8> A;
      KDA_UNROLL
      for (int m = 0; m < 2; ++m) {
        simdgroup_load(A, slab + (4 * i + m) * KDA_TILE, 8, ulong2(0, 0), true);
        const int to = i % 2 * 2 + m;
        simdgroup_multiply_accumulate(R[to], A, S[4 * s + i], R[to]);
      }
      KDA_UNROLL
      for (int m = 0; m < 2; ++m) {
        simdgroup_load(A, slab + (4 * i + 2 + m) * KDA_TILE, 8, ulong2(0, 0), true);
        const int to = i % 2 * 2 + m;
        simdgroup_multiply_accumulate(O[to], A, S[4 * s + i], O[to]);
      }
    }
    slabs[(s + 1) % 2 * KQ16 + tid] = next0;
    if (last) {
      if (tid < KDA_SLAB) {
        decay_s[(s + 1) % 2 * KDA_SLAB + tid] = next_decay;
      }
    } else if (TWO) {
      slabs[(s + 1) % 2 * KQ16 + 128 + tid] = next1;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  kq4 += SLABS * KQ16;

  simdgroup_float8x8 U[2];
  {
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) {
      R[i / 2].thread_elements()[i % 2] = v_c[i] -
          (R[i / 2].thread_elements()[i % 2] + R[i / 2 + 2].thread_elements()[i % 2]);
      O[i / 2].thread_elements()[i % 2] += O[i / 2 + 2].thread_elements()[i % 2];
    }
    simdgroup_float8x8 A;
    simdgroup_load(A, tri_at, 8);
    simdgroup_multiply(U[0], A, R[0]);
    simdgroup_load(A, tri_at + KDA_TILE, 8);
    simdgroup_multiply(U[1], A, R[0]);
    simdgroup_load(A, tri_at + 2 * KDA_TILE, 8);
    simdgroup_multiply_accumulate(U[1], A, R[1], U[1]);
    simdgroup_load(A, tri_at + 3 * KDA_TILE, 8);
    simdgroup_multiply_accumulate(O[0], A, U[0], O[0]);
    simdgroup_load(A, tri_at + 4 * KDA_TILE, 8);
    simdgroup_multiply_accumulate(O[1], A, U[0], O[1]);
    simdgroup_load(A, tri_at + 5 * KDA_TILE, 8);
    simdgroup_multiply_accumulate(O[1], A, U[1], O[1]);
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int t = n * KDA_CHUNK + i / 2 * 8 + fm;
      if (t < count) {
        o[((size_t(b) * count + t) * Hv + hv) * Dv + dv0 + fn + i % 2] =
            static_cast<InT>(t < valid ? O[i / 2].thread_elements()[i % 2] : 0.0f);
      }
    }
  }

  KDA_UNROLL
  for (int s = 0; s < SLABS; ++s) {
    const bool last = s + 1 == SLABS;
    const int now = (SLABS + s) % 2;
    float4 next0 = float4(0.0f);
    float4 next1 = float4(0.0f);
    float next_decay = 0.0f;
    if (!last) {
      next0 = kh4[(s + 1) * KH16 + tid];
      next_decay = tid < KDA_SLAB ? decay_at[(s + 1) * KDA_SLAB + tid] : 0.0f;
    } else if (n + 1 < chunks) {
      next0 = kq4[tid];
      if (TWO) {
        next1 = kq4[128 + tid];
      }
    }
    threadgroup const float* slab = (threadgroup const float*)(slabs + now * KQ16);
    KDA_UNROLL
    for (int i = 0; i < KDA_SLAB / 8; ++i) {
      const float kept = decay_s[now * KDA_SLAB + 8 * i + fm];
      S[4 * s + i].thread_elements()[0] *= kept;
      S[4 * s + i].thread_elements()[1] *= kept;
      simdgroup_float8x8 A;
      KDA_UNROLL
      for (int m = 0; m < 2; ++m) {
        simdgroup_load(A, slab + (2 * i + m) * KDA_TILE, 8);
        simdgroup_multiply_accumulate(S[4 * s + i], A, U[m], S[4 * s + i]);
      }
    }
    slabs[(1 - now) * KQ16 + tid] = next0;
    if (last) {
      if (TWO) {
        slabs[(1 - now) * KQ16 + 128 + tid] = next1;
      }
    } else if (tid < KDA_SLAB) {
      decay_s[(1 - now) * KDA_SLAB + tid] = next_decay;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  kh4 += SLABS * KH16;
}

KDA_UNROLL
for (int i = 0; i < Dk / 8; ++i) {
  simdgroup_store(S[i], state_out + state_at + 8 * i, Dk, ulong2(0, 0), true);
}
