// The MLP's first GEMM, h = a b^T + bias: gelu(h) as E4M3, the input of the second one, and gelu'(h) as a code of a byte
// for the backward. h itself is never in memory.

constexpr int PIECE = 16;

#include "product.cuh"
#include "gelu.cuh"

struct Gelu {
  const u16* bias;
  u8 *q, *slopes;
  float* amax;
  const int N;
  const float unit, factor;  // factors of the sums, and of the numbers to quantize
  int column = 0;            // this thread's first
  float largest = 0;
  u32 of_bias[PIECES][PIECE / 2];

  __device__ void begin(int slab) {
    column = slab * COLUMNS + my_place().q * PIECE;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4* from = reinterpret_cast<const uint4*>(bias + column + piece * SPAN) + half;
        const uint4 b = bias ? __ldg(from) : make_uint4(0, 0, 0, 0);
        u32* to = of_bias[piece] + half * 4;
        to[0] = b.x, to[1] = b.y, to[2] = b.z, to[3] = b.w;
      }
  }
  __device__ void prepare(int) {}

  __device__ void finish(int row, const float (&sums)[SUMS]) {
    const Place place = my_place();
    const u64 mine = static_cast<u64>(row + place.warp * 16 + place.g * 2) * N + column;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        u32 words[4], codes[4];
#pragma unroll
        for (int four = 0; four < 4; ++four) {
          float y[4];
          u32 code[4];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const float* two = sums + (piece * 8 + four * 2 + k) * 4 + s * 2;
            const u32 b = of_bias[piece][four * 2 + k];
            const u32 h = bfloat16s(fmaf(two[0], unit, low(b)), fmaf(two[1], unit, high(b)));
            code[k * 2] = to_code(gelu_slope(low(h), y[k * 2]));
            code[k * 2 + 1] = to_code(gelu_slope(high(h), y[k * 2 + 1]));
          }
          largest = fmaxf(largest, fmaxf(fmaxf(fabsf(y[0]), fabsf(y[1])), fmaxf(fabsf(y[2]), fabsf(y[3]))));
          words[four] = e4m3(y[0] * factor, y[1] * factor, y[2] * factor, y[3] * factor);
          codes[four] = pack_codes(code);
        }
        const u64 at = mine + (s ? N : 0) + piece * SPAN;
        *reinterpret_cast<uint4*>(q + at) = make_uint4(words[0], words[1], words[2], words[3]);
        *reinterpret_cast<uint4*>(slopes + at) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
      }
  }

  __device__ void end(const Run&, int, int) {}
  __device__ void last() { record(amax, largest); }
};

// map: of a [M, K]; b: [N, K]; bias: bfloat16 [N] or null; q, slopes: [M, N].
extern "C" __global__ void __launch_bounds__(THREADS, 1) product_gelu(
    const __grid_constant__ TensorMap map, const u8* __restrict__ b, const u16* __restrict__ bias,
    u8* __restrict__ q, u8* __restrict__ slopes, const float* __restrict__ a_scale_inv,
    const float* __restrict__ b_scale_inv, const float* __restrict__ scale, float* __restrict__ amax, int M, int N) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  Gelu epilogue{bias, q, slopes, amax, N, *a_scale_inv * *b_scale_inv, *scale};
  run_product(*reinterpret_cast<Memory*>(shared_memory), &map, b, M, N, epilogue);
}
