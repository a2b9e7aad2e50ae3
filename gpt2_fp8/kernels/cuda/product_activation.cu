// The MLP's first GEMM, h = a b^T + bias, and its activation: z as E4M3, the input of the second one, and with GELU
// gelu'(h) as a code of a byte for the backward. h itself is never in memory.

#include "product.cuh"
#if RELU_SQUARED
#include "relu_squared.cuh"
#else
#include "gelu.cuh"
#endif

__device__ __forceinline__ u32 pack_codes(const u32 (&code)[4]) {  // the lowest byte of each
  return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
}

struct Activation {
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
          float z[4];
          u32 code[4];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const float* two = sums + (piece * 8 + four * 2 + k) * 4 + s * 2;
            const u32 b = of_bias[piece][four * 2 + k];
            const u32 h = bfloat16s(fmaf(two[0], unit, low(b)), fmaf(two[1], unit, high(b)));
            code[k * 2] = activate(low(h), z[k * 2]);
            code[k * 2 + 1] = activate(high(h), z[k * 2 + 1]);
          }
          largest = fmaxf(largest, fmaxf(fmaxf(fabsf(z[0]), fabsf(z[1])), fmaxf(fabsf(z[2]), fabsf(z[3]))));
          words[four] = e4m3(z[0] * factor, z[1] * factor, z[2] * factor, z[3] * factor);
          codes[four] = pack_codes(code);
        }
        const u64 at = mine + (s ? N : 0) + piece * SPAN;
        *reinterpret_cast<uint4*>(q + at) = make_uint4(words[0], words[1], words[2], words[3]);
        if constexpr (KEEPS_CODES)
          *reinterpret_cast<uint4*>(slopes + at) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
      }
  }

  __device__ void end(const Run&, int, int) {}
  __device__ void last() { record(amax, largest); }
};

// map: of a [M, K]; b: [N, K]; bias: bfloat16 [N] or null; q, slopes: [M, N], the latter written only if KEEPS_CODES.
extern "C" __global__ void __launch_bounds__(THREADS, 1) product_activation(
    const __grid_constant__ TensorMap map, const u8* __restrict__ b, const u16* __restrict__ bias,
    u8* __restrict__ q, u8* __restrict__ slopes, const float* __restrict__ a_scale_inv,
    const float* __restrict__ b_scale_inv, const float* __restrict__ scale, float* __restrict__ amax, int M, int N) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  Activation epilogue{bias, q, slopes, amax, N, *a_scale_inv * *b_scale_inv, *scale};
  run_product(*reinterpret_cast<Memory*>(shared_memory), &map, b, M, N, epilogue);
}
