// From g = a b^T, the gradient of the activation z = z(h), and what `product_activation.cu` left for z'(h) (GELU: its
// codes; squared ReLU: z itself) to g z'(h) as FP8, with its amax and sums of columns. g itself is never in memory.

#include "product.cuh"
#if RELU_SQUARED
#include "relu_squared.cuh"
#else
#include "gelu.cuh"
#endif

struct ActivationBackward {
  Memory& memory;
  const u8* slopes;
  u8* q;
  float *sums_out, *amax;
  const int N, parts;
  const float unit, factor;  // of the sums times `slope_of`, to undo all scales; and to quantize the gradient
  int first_column = 0;      // of the slab
  float largest = 0, totals[COLUMNS / 4] = {};
  u32 codes[2][PIECES][4];

  __device__ u64 mine(int row) const {  // this thread's first number of a tile
    const Place place = my_place();
    return static_cast<u64>(row + place.warp * 16 + place.g * 2) * N + (first_column + place.q * PIECE);
  }
  __device__ void begin(int slab) {
    first_column = slab * COLUMNS;
#pragma unroll
    for (float& total : totals) total = 0;
  }

  // The codes are loaded while the tile is multiplied.
  __device__ void prepare(int row) {
    const u8* from = slopes + mine(row);
#pragma unroll
    for (int s = 0; s < 2; ++s, from += N)
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        u32(&to)[4] = codes[s][piece];
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from + piece * SPAN));
      }
  }

  __device__ void finish(int row, const float (&sums)[SUMS]) {
    u8* to = q + mine(row);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      u32 words[2][4];
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        float d[2][4];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float sum = sums[(piece * 8 + four * 2 + k / 2) * 4 + s * 2 + k % 2];
            d[s][k] = sum * slope_of(codes[s][piece][four], k);
            largest = fmaxf(largest, fabsf(d[s][k]));
          }
          words[s][four] = fp8(d[s][0] * factor, d[s][1] * factor, d[s][2] * factor, d[s][3] * factor);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) totals[piece * PIECE + four * 4 + k] += d[0][k] + d[1][k];
      }
#pragma unroll
      for (int s = 0; s < 2; ++s)
        *reinterpret_cast<uint4*>(to + (s ? N : 0) + piece * SPAN) =
            make_uint4(words[s][0], words[s][1], words[s][2], words[s][3]);
    }
  }

  // The block's sums of this slab, in a fixed order; zeros for parts without a block. They are added in the memory of
  // the slab, which has been multiplied by then.
  __device__ void end(const Run& run, int tiles, int tiles_down) {
    constexpr int WARPS = 4 * WARPGROUPS;
    const Place place = my_place();
    float(*scratch)[COLUMNS] = reinterpret_cast<float(*)[COLUMNS]>(memory.slab);
    static_assert(sizeof(memory.slab) >= sizeof(float) * WARPS * COLUMNS, "room for each warp's sums");
    meet(1, CONSUMERS);
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) totals[i] += __shfl_xor_sync(~0u, totals[i], mask);
      if (place.g == i % 8) scratch[threadIdx.x / 32][i / PIECE * SPAN + place.q * PIECE + i % PIECE] = totals[i];
    }
    meet(1, CONSUMERS);
    if (threadIdx.x >= COLUMNS) return;
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += scratch[warp][threadIdx.x];
    const int first = block_of(run.slab * tiles_down, tiles), part = blockIdx.x - first;
    const int used = block_of((run.slab + 1) * tiles_down - 1, tiles) - first + 1;
    float* to = sums_out + first_column + threadIdx.x;
    to[static_cast<u64>(part) * N] = total * unit;
    if (part == 0)
      for (int other = used; other < parts; ++other) to[static_cast<u64>(other) * N] = 0;
  }
  __device__ void last() { record(amax, largest * unit); }
};

// map: of a [M, K]; b: [N, K]; slopes, q: [M, N]; sums_out: [parts, N].
extern "C" __global__ void __launch_bounds__(THREADS, 1) product_activation_backward(
    const __grid_constant__ TensorMap map, const u8* __restrict__ b, const u8* __restrict__ slopes,
    u8* __restrict__ q, float* __restrict__ sums_out, const float* __restrict__ a_scale_inv,
    const float* __restrict__ b_scale_inv, const float* __restrict__ scale, float* __restrict__ amax, int M, int N,
    int parts, const float* __restrict__ z_scale_inv) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  Memory& memory = *reinterpret_cast<Memory*>(shared_memory);
  const float unit = *a_scale_inv * *b_scale_inv * unit_of_slope(z_scale_inv);
  ActivationBackward epilogue{memory, slopes, q, sums_out, amax, N, parts, unit, unit * *scale};
  run_product(memory, &map, b, M, N, epilogue);
}
