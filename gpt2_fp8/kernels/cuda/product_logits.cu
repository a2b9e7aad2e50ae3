// Logits a b^T in bfloat16, and what a softmax needs of each row and slab: the largest logit, and the sum of
// exponentials relative to it. Columns from vocab_size on are ignored in both.

constexpr int PIECE = 8;

#include "product.cuh"

constexpr float LOG2E = 1.4426950408889634f, LOWEST = -3.4e38f;  // replaces -inf, since two may be subtracted

struct Logits {
  u16* logits;
  float2* parts;
  const int M, N, vocab_size;
  const float unit;
  int slab = 0;

  __device__ void begin(int of_slab) { slab = of_slab; }
  __device__ void prepare(int) {}

  __device__ void finish(int row, const float (&sums)[SUMS]) {
    if ((slab + 1) * COLUMNS <= vocab_size)
      finish<true>(row, sums);
    else
      finish<false>(row, sums);
  }

  // WHOLE: every column counts.
  template <bool WHOLE>
  __device__ __forceinline__ void finish(int row, const float (&sums)[SUMS]) {
    const Place place = my_place();
    const int mine = row + place.warp * 16 + place.g * 2, column = slab * COLUMNS + place.q * 8;
    u16* to = logits + static_cast<u64>(mine) * N + column;
    float found[4];  // of two rows: the largest, and the sum
#pragma unroll
    for (int s = 0; s < 2; ++s, to += N) {
      u32 pairs[PIECES][4];
      float largest = LOWEST, sum = 0;
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        u32(&p)[4] = pairs[piece];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float* two = sums + (piece * 4 + k) * 4 + s * 2;
          p[k] = bfloat16s(two[0] * unit, two[1] * unit);
          const int left = vocab_size - (column + piece * 32 + k * 2);  // columns that count from here on
          if (WHOLE || left > 0) largest = fmaxf(largest, low(p[k]));
          if (WHOLE || left > 1) largest = fmaxf(largest, high(p[k]));
        }
        *reinterpret_cast<uint4*>(to + piece * 32) = make_uint4(p[0], p[1], p[2], p[3]);
      }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int left = vocab_size - (column + piece * 32 + k * 2);
          if (WHOLE || left > 0) sum += power_of_two((low(pairs[piece][k]) - largest) * LOG2E);
          if (WHOLE || left > 1) sum += power_of_two((high(pairs[piece][k]) - largest) * LOG2E);
        }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
      found[s * 2] = largest, found[s * 2 + 1] = sum;
    }
    if (place.q == 0)
      *reinterpret_cast<float4*>(parts + static_cast<u64>(slab) * M + mine) =
          make_float4(found[0], found[1], found[2], found[3]);
  }

  __device__ void end(const Run&, int, int) {}
  __device__ void last() {}
};

// map: of a [M, K]; b: [N, K]; logits: bfloat16 [M, N]; parts: [N / COLUMNS, M].
extern "C" __global__ void __launch_bounds__(THREADS, 1) product_logits(
    const __grid_constant__ TensorMap map, const u8* __restrict__ b, u16* __restrict__ logits,
    float2* __restrict__ parts, const float* __restrict__ a_scale_inv, const float* __restrict__ b_scale_inv, int M,
    int N, int vocab_size) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  Logits epilogue{logits, parts, M, N, vocab_size, *a_scale_inv * *b_scale_inv};
  run_product(*reinterpret_cast<Memory*>(shared_memory), &map, b, M, N, epilogue);
}
