#include "layer_norm.cuh"

// dy, x and, if RESIDUAL, residual [M, N] bfloat16, the rows' statistics -> dx [M, N] bfloat16, the residual added; if
// CAST, q [M, N] and qt [N, M]: FP8 of dx times `scale`. sums_out [gridDim.x, 3, N]: of a block's rows, the gradients
// of weight, of bias, and dx summed. With RMS the norm is RMSNorm: there is no mean, and bias' sums are not written.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_backward(
    const u8* __restrict__ dy, const u8* __restrict__ x, const u8* __restrict__ residual,
    const float* __restrict__ mean, const float* __restrict__ rstd, const float* __restrict__ weight,
    u8* __restrict__ dx, u8* __restrict__ q, u8* __restrict__ qt, float* __restrict__ sums_out,
    const float* __restrict__ scale, float* amax, int M) {
  constexpr int WARPS = THREADS / 32, PIECE = ROWS * N * 2, STAGE = PIECE * (RESIDUAL ? 3 : 2) + 8 * ROWS;
  constexpr int SUMS = RMS ? ROWS : 2 * ROWS;  // of each row along itself, and with a mean of its gradient as well
  extern __shared__ __align__(128) u8 ring[];
  u32* words = reinterpret_cast<u32*>(ring + round_up(STAGES * STAGE));
  __shared__ float partial[2][WARPS * 2 * ROWS];
  __shared__ u64 full[STAGES];
  open_ring(full);
  Pieces ahead(M);
  auto order = [&](int stage) {
    if (ahead.none()) return;
    const u64 row = ahead.next();
    u8* to = ring + stage * STAGE;
    announce(&full[stage], STAGE - (RMS ? 4 * ROWS : 0));
    fetch(to, dy + row * N * 2, PIECE, &full[stage]);
    fetch(to + PIECE, x + row * N * 2, PIECE, &full[stage]);
    if (RESIDUAL) fetch(to + 2 * PIECE, residual + row * N * 2, PIECE, &full[stage]);
    if (!RMS) fetch(to + STAGE - 8 * ROWS, mean + row, 4 * ROWS, &full[stage]);
    fetch(to + STAGE - 4 * ROWS, rstd + row, 4 * ROWS, &full[stage]);
  };
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) order(stage);

  const int column = threadIdx.x * 4;
  const bool inside = column < N;
  float w[4] = {}, of_weight[4] = {}, of_bias[4] = {}, of_dx[4] = {}, largest = 0;
  if (inside) load(weight + column, w);
  const float factor = CAST ? *scale : 0;
  int stage = 0, parity = 0, turn = 0;
  for (int tile = 0; tile < tiles_of_block(M); ++tile) {
    const int start = row_of_tile(tile), parts = min(TILE, M - start) / ROWS;
    for (int part = 0; part < parts; ++part) {
      const int row = start + part * ROWS;
      await(&full[stage], parity);
      const u8* here = ring + stage * STAGE + column * 2;
      const float* statistics = reinterpret_cast<const float*>(ring + (stage + 1) * STAGE - 8 * ROWS);
      float g[ROWS][4], v[ROWS][4], sums[SUMS], reciprocal[ROWS];
      uint2 other[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float centre = RMS ? 0 : statistics[r];
        reciprocal[r] = statistics[ROWS + r];
        uint2 of_dy = make_uint2(0, 0), of_x = of_dy;
        other[r] = of_dy;
        if (inside) {
          of_dy = *reinterpret_cast<const uint2*>(here + r * N * 2);
          of_x = *reinterpret_cast<const uint2*>(here + PIECE + r * N * 2);
          if (RESIDUAL) other[r] = *reinterpret_cast<const uint2*>(here + 2 * PIECE + r * N * 2);
        }
        unpack(of_dy, g[r]), unpack(of_x, v[r]);
        sums[r] = sums[SUMS - ROWS + r] = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          v[r][c] = (v[r][c] - centre) * reciprocal[r];
          of_weight[c] += g[r][c] * v[r][c];
          if (!RMS) of_bias[c] += g[r][c];
          g[r][c] *= w[c];
          sums[r] += g[r][c] * v[r][c];
          if constexpr (!RMS) sums[ROWS + r] += g[r][c];
        }
      }
      const float means = over_block<SUMS, WARPS>(sums, partial[turn ^= 1]) * (1.0f / N);
      if (threadIdx.x == 0) order(stage);  // all threads have read what was there
      if (++stage == STAGES) stage = 0, parity ^= 1;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float along = of_row(means, r), total = RMS ? 0 : of_row(means, ROWS + r);
        float more[4];
        unpack(other[r], more);
#pragma unroll
        for (int c = 0; c < 4; ++c)
          v[r][c] = reciprocal[r] * (g[r][c] - total - v[r][c] * along) + (RESIDUAL ? more[c] : 0);
        const u64 at = static_cast<u64>(row + r) * N + column;
        if (inside)
          *reinterpret_cast<uint2*>(dx + at * 2) = make_uint2(bfloat16s(v[r][0], v[r][1]), bfloat16s(v[r][2], v[r][3]));
        if (CAST) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            of_dx[c] += v[r][c];
            largest = fmaxf(largest, inside ? fabsf(v[r][c]) : 0);
            v[r][c] *= factor;
          }
          if (inside) *reinterpret_cast<u32*>(q + at) = fp8(v[r][0], v[r][1], v[r][2], v[r][3]);
        }
      }
      if (CAST && inside) keep<ROWS>(words, part * ROWS / 4, column, v);
    }
    if (CAST) {
      __syncthreads();  // the next tile's words come after another one
      transpose(words, qt, start, M);
    }
  }
  sums_out += static_cast<u64>(blockIdx.x) * 3 * N + column;
  if (inside) {
    store(sums_out, of_weight);
    if (!RMS) store(sums_out + N, of_bias);
    store(sums_out + 2 * N, of_dx);
  }
  if (CAST) record(amax, largest);
}
