// What kda_chunk_prepare writes and kda_chunk_scan reads: a workspace of 8 x 8 tiles, 64 values
// each, one after another, so that every tile is one contiguous read.
//
//   kq     a slab of 32 channels is 16 tiles: for each 8 channels K~ of tokens 0-7, K~ of 8-15,
//          Q~ of 0-7, Q~ of 8-15, each as [channel][token]
//   kh     a slab is 8 tiles: for each 8 channels K^ of tokens 0-7 and of 8-15, [channel][token]
//   tri    6 float tiles [row][column]: T00, T10, T11 of (I + diag(beta) N)^-1 diag(beta), then
//          M00, M10, M11
//   decay  Dk floats, the decay of the whole chunk

enum KdaChunk {
  KDA_CHUNK = 16,       // tokens
  KDA_TILE = 64,        // values per tile
  KDA_SLAB = 32,        // channels staged at a time
  KDA_KQ_SLAB = 1024,   // values per slab of kq
  KDA_KH_SLAB = 512,    // values per slab of kh
  KDA_TRI = 384         // values of tri per chunk
};

// Sixteen partial sums, pairwise.
KDA_FUNC float kda_sum16(threadgroup const float* x) {
  float sum[8];
  KDA_UNROLL
  for (int i = 0; i < 8; ++i) {
    sum[i] = x[i] + x[i + 8];
  }
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}
