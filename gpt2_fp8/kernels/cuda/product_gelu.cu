// h = a b^T + bias in bfloat16, and gelu(h) as E4M3: the MLP's first GEMM, with the input of its second one.

constexpr int TURNED_BYTES = 16;  // nothing is transposed

#include "product.cuh"
#include "gelu.cuh"

struct Gelu {
  const u16* bias;
  u16* h;
  u8* q;
  float* amax;
  const int N;
  const float unit, factor;  // factors of the sums, and of the numbers to quantize
  int column = 0;            // this thread's first
  float largest = 0;

  __device__ void begin(int slab) { column = slab * COLUMNS + my_place().q * 8; }
  __device__ void prepare(int) {}

  __device__ void finish(int row, const float (&sums)[SUMS]) {
    const Place place = my_place();
    const u64 mine = static_cast<u64>(row + place.warp * 16 + place.g * 2) * N + column;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      const uint4 biases = bias ? __ldg(reinterpret_cast<const uint4*>(bias + column + piece * 32)) : make_uint4(0, 0, 0, 0);
      const u32 of_bias[4] = {biases.x, biases.y, biases.z, biases.w};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const u64 at = mine + (s ? N : 0) + piece * 32;
        u32 pairs[4];
        float y[8];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float* two = sums + (piece * 4 + k) * 4 + s * 2;
          pairs[k] = bfloat16s(fmaf(two[0], unit, low(of_bias[k])), fmaf(two[1], unit, high(of_bias[k])));
          y[k * 2] = gelu(low(pairs[k])), y[k * 2 + 1] = gelu(high(pairs[k]));
        }
        *reinterpret_cast<uint4*>(h + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#pragma unroll
        for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(y[k])), y[k] *= factor;
        *reinterpret_cast<uint2*>(q + at) = make_uint2(e4m3(y[0], y[1], y[2], y[3]), e4m3(y[4], y[5], y[6], y[7]));
      }
    }
  }

  __device__ void end(const Run&, int, int) {}
  __device__ void last() { record(amax, largest); }
};

// map: of a [M, K]; b: [N, K]; bias: bfloat16 [N] or null; h: bfloat16 [M, N]; q: [M, N].
extern "C" __global__ void __launch_bounds__(THREADS, 1) product_gelu(
    const __grid_constant__ TensorMap map, const u8* __restrict__ b, const u16* __restrict__ bias,
    u16* __restrict__ h, u8* __restrict__ q, const float* __restrict__ a_scale_inv,
    const float* __restrict__ b_scale_inv, const float* __restrict__ scale, float* __restrict__ amax, int M, int N) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  Gelu epilogue{bias, h, q, amax, N, *a_scale_inv * *b_scale_inv, *scale};
  run_product(*reinterpret_cast<Memory*>(shared_memory), &map, b, M, N, epilogue);
}
