#include "layer_norm.cuh"

// x [M, N] bfloat16 -> q [M, N] and, if BOTH, qt [N, M]: FP8 of the normalised rows times `scale`; the rows'
// statistics. With FACTORS only qt is written, and each row is multiplied by its own factor as well, after its part in
// `amax`. With RMS the norm is RMSNorm: rows are divided by the root of their mean square, and there is no mean or bias.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_forward(
    const u8* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias, u8* __restrict__ q,
    u8* __restrict__ qt, float* __restrict__ mean_out, float* __restrict__ rstd_out, const float* __restrict__ scale,
    float* amax, int M, float epsilon
#if FACTORS
    , const float* __restrict__ factors
#endif
) {
  constexpr int WARPS = THREADS / 32, PIECE = ROWS * N * 2;
  extern __shared__ __align__(128) u8 ring[];
  u32* words = reinterpret_cast<u32*>(ring + round_up(STAGES * PIECE));
  __shared__ float partial[2][WARPS * ROWS];
  __shared__ u64 full[STAGES];
  open_ring(full);
  Pieces ahead(M);
  auto order = [&](int stage) {
    if (ahead.none()) return;
    announce(&full[stage], PIECE);
    fetch(ring + stage * PIECE, x + static_cast<u64>(ahead.next()) * N * 2, PIECE, &full[stage]);
  };
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) order(stage);

  const int column = threadIdx.x * 4;
  const bool inside = column < N;
  float w[4] = {}, b[4] = {}, largest = 0;
  if (inside) {
    load(weight + column, w);
    if (!RMS) load(bias + column, b);
  }
  const float factor = *scale;
  int stage = 0, parity = 0, turn = 0;
  for (int tile = 0; tile < tiles_of_block(M); ++tile) {
    const int start = row_of_tile(tile), parts = min(TILE, M - start) / ROWS;
    for (int part = 0; part < parts; ++part) {
      const int row = start + part * ROWS;
      await(&full[stage], parity);
      float v[ROWS][4], sums[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        uint2 pairs = make_uint2(0, 0);
        if (inside) pairs = *reinterpret_cast<const uint2*>(ring + stage * PIECE + (r * N + column) * 2);
        unpack(pairs, v[r]);
        if (RMS)
          sums[r] = (v[r][0] * v[r][0] + v[r][1] * v[r][1]) + (v[r][2] * v[r][2] + v[r][3] * v[r][3]);
        else
          sums[r] = (v[r][0] + v[r][1]) + (v[r][2] + v[r][3]);
      }
      if (RMS) turn ^= 1;  // of LayerNorm's two sums each has its own place
      const float moment = over_block<ROWS, WARPS>(sums, partial[turn]) * (1.0f / N);
      if (threadIdx.x == 0) order(stage);  // all threads have read what was there
      if (++stage == STAGES) stage = 0, parity ^= 1;
      float variance = moment;
      if (!RMS) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const float centre = of_row(moment, r);
          sums[r] = 0;
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            v[r][c] = inside ? v[r][c] - centre : 0;
            sums[r] += v[r][c] * v[r][c];
          }
        }
        variance = over_block<ROWS, WARPS>(sums, partial[1]) * (1.0f / N);
      }
      const float rstd = rsqrtf(variance + epsilon);
      if (!FACTORS && threadIdx.x < ROWS) {
        if (!RMS) mean_out[row + threadIdx.x] = moment;
        rstd_out[row + threadIdx.x] = rstd;
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float reciprocal = of_row(rstd, r);
#if FACTORS
        const float all = factor * __ldg(factors + row + r);
#else
        const float all = factor;
#endif
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          v[r][c] = v[r][c] * reciprocal * w[c] + b[c];
          largest = fmaxf(largest, fabsf(v[r][c]));
          v[r][c] *= all;
        }
        u8* at = q + static_cast<u64>(row + r) * N + column;
        if (!FACTORS && inside) *reinterpret_cast<u32*>(at) = fp8(v[r][0], v[r][1], v[r][2], v[r][3]);
      }
      if (BOTH && inside) keep<ROWS>(words, part * ROWS / 4, column, v);
    }
    if (BOTH) {
      __syncthreads();  // the next tile's words come after another one
      transpose(words, qt, start, M);
    }
  }
  record(amax, largest);
}
