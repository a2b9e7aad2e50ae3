// From bfloat16 (FLOAT32: float32) to FP8 in both layouts, with the largest magnitude and (SUMS) the sums of columns.
// See `tile.cuh`; all that a lane reads is on its way before the first number is used.

#include "tile.cuh"

#if FLOAT32
typedef float Number;
typedef float4 Four;
__device__ __forceinline__ void unpack(float4 four, float (&out)[4]) {
  out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
}
#else
typedef unsigned short Number;
typedef uint2 Four;
#endif

// x: [M, N], both multiples of 16. q: [M, N], qt: [N, M], sums_out: [tiles below each other, N].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cast(
    const Number* __restrict__ x, u8* __restrict__ q, u8* __restrict__ qt, float* __restrict__ sums_out,
    const float* __restrict__ scale, float* __restrict__ amax, int M, int N) {
  __shared__ uint4 pieces[TILE * PIECES];
  __shared__ Known known;
  const int2 first = origin(N);
  const int row = first.x + threadIdx.x / 32 * ROWS, column = first.y + threadIdx.x % 32 * LANE;
  const bool inside = row < M && column < N;
  const u64 at = static_cast<u64>(row) * N + column;
  const float factor = *scale;
  float largest = 0, sums[LANE] = {};

  Four fours[ROWS];
  if (inside) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) fours[r] = __ldcs(reinterpret_cast<const Four*>(x + at + static_cast<u64>(r) * N));
  }
  __syncwarp();  // without it the compiler uses the first numbers before it asks for the last
  if (inside) {
#pragma unroll
    for (int g = 0; g < ROWS / 4; ++g) {
      float v[4][LANE];
      u32 words[LANE];
#pragma unroll
      for (int r = 0; r < 4; ++r) unpack(fours[g * 4 + r], v[r]);
#pragma unroll
      for (int c = 0; c < LANE; ++c) {
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v[0][c]), fabsf(v[1][c])), fmaxf(fabsf(v[2][c]), fabsf(v[3][c]))));
        sums[c] += (v[0][c] + v[1][c]) + (v[2][c] + v[3][c]);
        words[c] = fp8(v[0][c] * factor, v[1][c] * factor, v[2][c] * factor, v[3][c] * factor);
      }
      store_rows(q + at + static_cast<u64>(g * 4) * N, N, words[0], words[1], words[2], words[3]);
      keep(pieces, g, words[0], words[1], words[2], words[3]);
    }
  }
  tell(known, largest, sums, SUMS);
  __syncthreads();
  store_columns(qt, pieces, first, M, N);
  finish(known, amax, sums_out, first, N, SUMS);
}
