// From logits to (softmax - onehot) times 2^EXPONENT, as FP8 in both layouts, in one pass over memory.
//
// A block makes one tile of TILE rows by TILE columns, and so writes whole lines of 128 bytes in both outputs. A warp
// has 16 of the rows, a lane four of the columns. A lane issues the loads of its 64 logits before it uses the first.
// Its 16 rows of a column are 16 bytes of `qt`. They go through shared memory, so that neighbouring lanes write
// neighbouring bytes. If a row's target is in the tile, that one element is corrected afterwards: this is cheaper than
// a test for each element.
//
// With Z_LOSS, softmax is multiplied by 1 + 2 z_loss lse, where lse is the logarithm of the row's sum of exponentials.

#include "tile.cuh"

constexpr float LOG2E = 1.4426950408889634f;

#ifdef Z_LOSS
constexpr float LN2 = 0.6931471805599453f;

// What a logit needs of its row: the largest logit, EXPONENT minus log2 of the row's sum, and what z-loss multiplies by.
struct __align__(16) Row {
  float maximum, shift, more;
};

__device__ __forceinline__ float probability(float logit, Row row) {
  return power_of_two(fmaf(logit - row.maximum, LOG2E, row.shift)) * row.more;
}
#else

// What a logit needs of its row: the largest logit, and EXPONENT minus log2 of the row's sum.
struct __align__(8) Row {
  float maximum, shift;
};

__device__ __forceinline__ float probability(float logit, Row row) {
  return power_of_two(fmaf(logit - row.maximum, LOG2E, row.shift));
}
#endif

// logits: bfloat16 [M, N], both multiples of 16. exponents [M]: the largest logit, and log2 of the sum.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) softmax_gradient(
    const unsigned short* __restrict__ logits, const long long* __restrict__ targets,
    const float2* __restrict__ exponents, u8* __restrict__ q, u8* __restrict__ qt, int M, int N, int vocab_size
#ifdef Z_LOSS
    , float z_loss
#endif
) {
  __shared__ uint4 pieces[TILE * PIECES];
  __shared__ __align__(16) Row rows[TILE];
  __shared__ __align__(16) u8 counted[TILE];  // 0 or 255
  const int2 first = origin(N);
  const int piece = threadIdx.x / 32, row = first.x + piece * ROWS, column = first.y + threadIdx.x % 32 * LANE;
  const bool inside = row < M && column < N;

  // One thread for each row knows whether the row's target is here. These few loads come first, the many directly after
  // them.
  const int mine = first.x + threadIdx.x;
  const bool owner = threadIdx.x < TILE && mine < M;
  const long long wanted = owner ? targets[mine] : -1;
  const float2 exponent = owner ? exponents[mine] : make_float2(0, 0);
  uint2 pairs[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    if (inside) pairs[r] = __ldcs(reinterpret_cast<const uint2*>(logits + static_cast<u64>(row + r) * N + column));
  if (owner) {
#ifdef Z_LOSS
    rows[threadIdx.x] = {exponent.x, EXPONENT - exponent.y, fmaf(2 * z_loss, fmaf(exponent.y, LN2, exponent.x), 1)};
#else
    rows[threadIdx.x] = {exponent.x, EXPONENT - exponent.y};
#endif
    counted[threadIdx.x] = wanted < 0 ? 0 : 255;
  }
  const int target = wanted >= first.y && wanted < first.y + TILE ? wanted - first.y : -1;
  u32 at_target = 0;
  if (target >= 0) at_target = logits[static_cast<u64>(mine) * N + wanted];
  __syncthreads();

  if (inside) {
    u32 words[LANE][ROWS / 4];
#pragma unroll
    for (int g = 0; g < ROWS / 4; ++g) {
      float v[4][LANE];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const Row of_row = rows[piece * ROWS + g * 4 + r];
        const uint2 pair = pairs[g * 4 + r];
        v[r][0] = probability(low(pair.x), of_row), v[r][1] = probability(high(pair.x), of_row);
        v[r][2] = probability(low(pair.y), of_row), v[r][3] = probability(high(pair.y), of_row);
      }
      const u32 kept = reinterpret_cast<const u32*>(counted)[piece * (ROWS / 4) + g];
#pragma unroll
      for (int c = 0; c < LANE; ++c)
        words[c][g] = fp8(v[0][c], v[1][c], v[2][c], v[3][c]) & (column + c < vocab_size ? kept : 0);
      store_rows(q + static_cast<u64>(row + g * 4) * N + column, N, words[0][g], words[1][g], words[2][g], words[3][g]);
    }
#pragma unroll
    for (int c = 0; c < LANE; ++c)
      pieces[place(column - first.y + c, piece)] = make_uint4(words[c][0], words[c][1], words[c][2], words[c][3]);
  }

  if (__syncthreads_or(target >= 0)) {
    if (target >= 0) {
      const u8 byte = fp8(probability(low(at_target), rows[threadIdx.x]) - (1 << EXPONENT), 0, 0, 0);
      q[static_cast<u64>(mine) * N + wanted] = byte;
      reinterpret_cast<u8*>(pieces + place(target, threadIdx.x / ROWS))[threadIdx.x % ROWS] = byte;
    }
    __syncthreads();
  }
  const int p = threadIdx.x % PIECES;
  if (first.x + p * ROWS >= M) return;
#pragma unroll
  for (int i = 0; i < TILE; i += THREADS / PIECES) {
    const int c = i + threadIdx.x / PIECES;
    if (first.y + c < N)
      *reinterpret_cast<uint4*>(qt + static_cast<u64>(first.y + c) * M + first.x + p * ROWS) = pieces[place(c, p)];
  }
}
