// Quantization from bfloat16 (FLOAT32: float32) to FP8 in both layouts, with the amax and (SUMS) the sums of columns.
// See `tile.cuh`. A lane issues all its loads before it uses the first number.

#include "tile.cuh"

// keep: write four rows (number `g` of a warp's four fours) of a lane's columns to shared memory. The words of a piece
// are permuted so that 32 lanes use all banks: word `g` is at g ^ column / 32. store_columns: after a barrier, write
// all of the block to `to` [N, M].
__device__ __forceinline__ void keep(uint4* pieces, int g, u32 a, u32 b, u32 c, u32 d) {
  const int lane = threadIdx.x % 32;
  u32* to = reinterpret_cast<u32*>(pieces + place(lane * LANE, threadIdx.x / 32)) + (g ^ lane * LANE / 32);
  to[0] = a, to[4 * PIECES] = b, to[8 * PIECES] = c, to[12 * PIECES] = d;
}
__device__ __forceinline__ void store_columns(u8* to, const uint4* pieces, int2 first, int M, int N) {
  const int p = threadIdx.x % PIECES, row = first.x + p * ROWS;
#pragma unroll
  for (int k = 0; k < TILE / 32; ++k) {
    const int c = k * 32 + threadIdx.x / PIECES;
    if (row >= M || first.y + c >= N) continue;
    const uint4 piece = pieces[place(c, p)];
    const u32 w[4] = {piece.x, piece.y, piece.z, piece.w};
    *reinterpret_cast<uint4*>(to + static_cast<u64>(first.y + c) * M + row) =
        make_uint4(w[k], w[1 ^ k], w[2 ^ k], w[3 ^ k]);
  }
}

// What the warps of a block know of their rows: the amax, and the sums of the columns.
struct __align__(16) Known {
  float sums[PIECES][TILE], largest[PIECES];
};

// tell: each warp writes its part. finish: after a barrier, one warp raises `amax`, and others write the block's sums.
// The order of summation is fixed, so the result is the same every time.
__device__ __forceinline__ void tell(Known& known, float largest, const float (&sums)[LANE]) {
  const u32 bits = __reduce_max_sync(~0u, __float_as_uint(largest));
  if (threadIdx.x % 32 == 0) known.largest[threadIdx.x / 32] = __uint_as_float(bits);
  if constexpr (SUMS) store(known.sums[threadIdx.x / 32] + threadIdx.x % 32 * LANE, sums);
}
__device__ __forceinline__ void finish(const Known& known, float* amax, float* sums_out, int2 first,
                                       int N) {
  if (threadIdx.x < 32) record(amax, threadIdx.x < PIECES ? known.largest[threadIdx.x] : 0);
  const int c = static_cast<int>(threadIdx.x) - (THREADS - TILE);
  if (!SUMS || c < 0 || first.y + c >= N) return;
  float sum = 0;
#pragma unroll
  for (int p = 0; p < PIECES; ++p) sum += known.sums[p][c];
  sums_out[static_cast<u64>(first.x / TILE) * N + first.y + c] = sum;
}

#if FLOAT32
typedef float Number;
typedef float4 Four;
__device__ __forceinline__ void unpack(float4 four, float (&out)[4]) {
  out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
}
#else
typedef u16 Number;
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
  tell(known, largest, sums);
  __syncthreads();
  store_columns(qt, pieces, first, M, N);
  finish(known, amax, sums_out, first, N);
}
