// kda_chunk_scan: carries the state over the chunks that kda_chunk_prepare prepared.
//
//   R = V - K~ S^T     U = T R     O = Q~ S^T + M U     S <- S * P_16 + U^T K^
//
// Inputs   kq (OpT), kh, tri, decay (see kda_chunk.h)  v [B,T,Hv,Dv]  state [B,Hv,Dv,Dk] float
//          lengths [>=B] int  dims [T, Hv, start, count, chunks] int
// Outputs  o [B,count,Hv,Dv]: tokens start .. start+count;  state_out [B,Hv,Dv,Dk]
//
// Thread map: a threadgroup of 8 SIMD-groups owns 32 value columns of one head; two SIMD-groups, one
// for each half of the channels, own 8, with S^T as Dk/16 tiles [channel][column] in registers. Grid
// (256 * Dv/32, B*Hv). A step is a slab of 32 channels, first of K~ and Q~, then of K^, in threadgroup
// memory; two buffers. In a step a slab is requested for the step after the next, the current one
// used, and the next one, requested in the step before, written; one barrier per step. After the steps
// of K~ and Q~ the halves exchange what the other needs to finish: R for both, O of one block each.
// Threadgroup bytes: 16,384 at Dk = 128 with float operands, 12,288 with half; 4 Dk of them decay.
// Order of reductions: channels of a half in tiles of 8 inside the matrix unit; then the two halves.
// Why: 105 matrix products per 16 tokens and 8 columns (64 for R and O, 6 for U, 3 for M U, 32 for
// S) and not one cross-lane sum. The state is what limits a small batch: 32 heads are 512
// SIMD-groups if one has all the channels of 8 columns, about one for each scheduler of a large GPU,
// with nothing to do while it waits; halves double them, at half the registers, for 3 products more.
// Eight SIMD-groups share a slab, so memory is read Dv/32 times. K~ and Q~ may be half: the
// recurrence corrects what an inexact K~ predicts. K^ stays float, as do S and all sums: its rounding
// would add up in S.

constexpr int SLABS = Dk / KDA_SLAB;
constexpr int STEPS = 2 * SLABS;
constexpr int KQ16 = KDA_KQ_SLAB * int(sizeof(OpT)) / 16;  // 16-byte pieces of a slab: 128 or 256
constexpr int KH16 = KDA_KH_SLAB * 4 / 16;                 // 128
constexpr int TRI16 = KDA_TRI / 4;                         // 96

threadgroup float4 slabs[2 * KQ16];
threadgroup float4 tri_s[TRI16];
threadgroup float4 decay_s[Dk / 4];
threadgroup float exchange[8 * 3 * KDA_TILE];

const int T = dims[0];
const int Hv = dims[1];
const int start = dims[2];
const int count = dims[3];
const int chunks = dims[4];

const int tid = int(thread_position_in_threadgroup.x);
const int lane = int(thread_index_in_simdgroup);
const int sg = int(simdgroup_index_in_threadgroup);
const int part = sg / 4;  // of the channels
const int head = int(threadgroup_position_in_grid.y);
const int b = head / Hv;
const int hv = head % Hv;
const int dv0 = int(threadgroup_position_in_grid.x) * 32 + sg % 4 * 8;
const int valid = clamp(int(lengths[b]) - start, 0, count);
// The two elements of an 8 x 8 tile that a lane holds: (fm, fn) and (fm, fn + 1).
const int fm = lane / 16 * 4 + lane / 2 % 4;
const int fn = lane / 8 % 2 * 4 + lane % 2 * 2;

const device float4* kq4 = (const device float4*)kq + size_t(head) * chunks * SLABS * KQ16;
const device float4* kh4 = (const device float4*)kh + size_t(head) * chunks * SLABS * KH16;
const device float4* tri4 = (const device float4*)tri + size_t(head) * chunks * TRI16;
const device float4* decay4 = (const device float4*)decay + size_t(head) * chunks * (Dk / 4);
const size_t row = size_t(Hv) * Dv;  // stride between tokens
const device InT* v_at = v + (size_t(b) * T + start) * row + hv * Dv + dv0 + fn;
device InT* o_at = o + size_t(b) * count * row + hv * Dv + dv0 + fn;
threadgroup float* mine = exchange + sg * 3 * KDA_TILE;
threadgroup float* others = exchange + (sg + 4) % 8 * 3 * KDA_TILE;

// A SIMD-group has the tiles 2 part and 2 part + 1 of the four in every slab.
simdgroup_float8x8 S[Dk / 16];
const size_t state_at = (size_t(head) * Dv + dv0) * Dk + 16 * part;
KDA_UNROLL
for (int i = 0; i < Dk / 16; ++i) {
  simdgroup_load(S[i], state + state_at + i / 2 * KDA_SLAB + i % 2 * 8, Dk, ulong2(0, 0), true);
}

// Loads in flight: slabs by the parity of their step, and T, M and the decay of a chunk.
float4 next[2];
float4 small = float4(0.0f);
next[0] = float4(0.0f);
next[1] = float4(0.0f);
if (tid < KQ16) {
  slabs[tid] = kq4[tid];
}
if (SLABS > 1) {
  next[1] = tid < KQ16 ? kq4[KQ16 + tid] : float4(0.0f);
} else {
  next[1] = tid < KH16 ? kh4[tid] : float4(0.0f);
}
if (tid < TRI16) {
  small = tri4[tid];
} else if (tid < TRI16 + Dk / 4) {
  small = decay4[tid - TRI16];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int n = 0; n < chunks; ++n) {
  const bool more = n + 1 < chunks;
  InT v_c[4];  // converted where it is used, not where it is loaded
  KDA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int t = n * KDA_CHUNK + i / 2 * 8 + fm;
    v_c[i] = static_cast<InT>(0.0f);
    if (part == 0 && t < valid) {
      v_c[i] = v_at[t * row + i % 2];
    }
  }
  simdgroup_float8x8 R[2];
  simdgroup_float8x8 O[2];  // of the block that this half finishes, and of the other
  simdgroup_float8x8 U[2];
  KDA_UNROLL
  for (int i = 0; i < 2; ++i) {
    R[i] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    O[i] = make_filled_simdgroup_matrix<float, 8>(0.0f);
  }

  KDA_UNROLL
  for (int step = 0; step < STEPS; ++step) {
    // Request the slab of step + 2; after the last step comes the next chunk.
    const int ahead = (step + 2) % STEPS;
    const bool follows = step + 2 >= STEPS;
    const int chunk = n + (follows ? 1 : 0);
    if (!follows || more) {
      if (ahead < SLABS) {
        if (tid < KQ16) {
          next[step % 2] = kq4[(chunk * SLABS + ahead) * KQ16 + tid];
        }
      } else if (tid < KH16) {
        next[step % 2] = kh4[(chunk * SLABS + ahead - SLABS) * KH16 + tid];
      }
    }

    if (step == 1 && more) {
      if (tid < TRI16) {
        small = tri4[(n + 1) * TRI16 + tid];
      } else if (tid < TRI16 + Dk / 4) {
        small = decay4[(n + 1) * (Dk / 4) + tid - TRI16];
      }
    }

    if (step < SLABS) {
      threadgroup const OpT* slab = (threadgroup const OpT*)(slabs + step % 2 * KQ16);
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        threadgroup const OpT* tile = slab + (2 * part + i) * 4 * KDA_TILE;
        simdgroup_matrix<OpT, 8, 8> A[4];
        KDA_UNROLL
        for (int m = 0; m < 2; ++m) {
          simdgroup_load(A[m], tile + m * KDA_TILE, 8, ulong2(0, 0), true);
          simdgroup_load(A[2 + m], tile + (2 + (m ^ part)) * KDA_TILE, 8, ulong2(0, 0), true);
        }
        KDA_UNROLL
        for (int m = 0; m < 2; ++m) {
          simdgroup_multiply_accumulate(R[m], A[m], S[2 * step + i], R[m]);
          simdgroup_multiply_accumulate(O[m], A[2 + m], S[2 * step + i], O[m]);
        }
      }
    } else {
      const int s = step - SLABS;
      threadgroup const float* slab = (threadgroup const float*)(slabs + step % 2 * KQ16);
      threadgroup const float* kept = (threadgroup const float*)decay_s + s * KDA_SLAB + 16 * part;
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        simdgroup_float8x8 A;
        const float by = kept[8 * i + fm];
        S[2 * s + i].thread_elements()[0] *= by;
        S[2 * s + i].thread_elements()[1] *= by;
        KDA_UNROLL
        for (int m = 0; m < 2; ++m) {
          simdgroup_load(A, slab + (2 * (2 * part + i) + m) * KDA_TILE, 8);
          simdgroup_multiply_accumulate(S[2 * s + i], A, U[m], S[2 * s + i]);
        }
      }
    }

    // Write what was requested a step ago.
    if (step + 1 < STEPS || more) {
      if (tid < ((step + 1) % STEPS < SLABS ? KQ16 : KH16)) {
        slabs[(step + 1) % 2 * KQ16 + tid] = next[(step + 1) % 2];
      }
    }
    if (step == 0) {
      if (tid < TRI16) {
        tri_s[tid] = small;
      } else if (tid < TRI16 + Dk / 4) {
        decay_s[tid - TRI16] = small;
      }
    }
    if (step + 1 == SLABS) {
      KDA_UNROLL
      for (int i = 0; i < 4; ++i) {
        R[i / 2].thread_elements()[i % 2] = float(v_c[i]) - R[i / 2].thread_elements()[i % 2];
      }
      simdgroup_store(R[0], mine, 8);
      simdgroup_store(R[1], mine + KDA_TILE, 8);
      simdgroup_store(O[1], mine + 2 * KDA_TILE, 8);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (step + 1 == SLABS) {
      threadgroup const float* T_s = (threadgroup const float*)tri_s;
      threadgroup const float* M_s = T_s + 3 * KDA_TILE;
      simdgroup_float8x8 theirs[3];
      KDA_UNROLL
      for (int i = 0; i < 3; ++i) {
        simdgroup_load(theirs[i], others + i * KDA_TILE, 8);
      }
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        R[0].thread_elements()[i] += theirs[0].thread_elements()[i];
        R[1].thread_elements()[i] += theirs[1].thread_elements()[i];
        O[0].thread_elements()[i] += theirs[2].thread_elements()[i];
      }
      simdgroup_float8x8 A;
      simdgroup_load(A, T_s, 8);
      simdgroup_multiply(U[0], A, R[0]);
      simdgroup_load(A, T_s + KDA_TILE, 8);
      simdgroup_multiply(U[1], A, R[0]);
      simdgroup_load(A, T_s + 2 * KDA_TILE, 8);
      simdgroup_multiply_accumulate(U[1], A, R[1], U[1]);
      simdgroup_load(A, M_s + part * KDA_TILE, 8);
      simdgroup_multiply_accumulate(O[0], A, U[0], O[0]);
      if (part == 1) {
        simdgroup_load(A, M_s + 2 * KDA_TILE, 8);
        simdgroup_multiply_accumulate(O[0], A, U[1], O[0]);
      }
      const int t = n * KDA_CHUNK + part * 8 + fm;
      if (t < count) {
        o_at[t * row] = static_cast<InT>(t < valid ? O[0].thread_elements()[0] : 0.0f);
        o_at[t * row + 1] = static_cast<InT>(t < valid ? O[0].thread_elements()[1] : 0.0f);
      }
    }
  }
}

KDA_UNROLL
for (int i = 0; i < Dk / 16; ++i) {
  simdgroup_store(S[i], state_out + state_at + i / 2 * KDA_SLAB + i % 2 * 8, Dk, ulong2(0, 0), true);
}
