// From g = a b^T, the gradient of gelu(h), to g gelu'(h) as FP8 in both layouts and gelu(h) as transposed E4M3, with
// the gradient's amax and sums of columns. g itself is never in memory.

constexpr int TURNED_BYTES = 128 * 64;  // the gradient first, then gelu(h)

#include "product.cuh"
#include "gelu.cuh"

// Where 16 rows (a warp's) of a column wait in shared memory, in bytes. Eight lanes that write or read 16 bytes each
// use all banks. The column 32 places further is `PIECE` bytes further.
constexpr int PIECE = 32 * ROWS;
__device__ __forceinline__ u32 waiting(int column, int warp) {
  return column * ROWS + (warp ^ column / 8 % 4) * 16;
}

// store_turned: word k of lanes 4 g + q has two rows of columns 2 k and 2 k + 1 of the lane's eight (see
// `product.cuh`). It is written where those columns wait. column_to_place: the column, of a piece's 32, whose place
// this lane gives.
__device__ __forceinline__ int column_to_place() {
  const int lane = threadIdx.x % 32;
  return lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
}
__device__ __forceinline__ void store_turned(u32 to, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 from) {
  uint4 v;
  asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

struct GeluBackward {
  Memory& memory;
  const u16* h;
  u8 *q, *qt, *yt;
  float *sums_out, *amax;
  const int M, N, parts;
  // factors: of the sums, to undo the scales; of the gradient, and of gelu(h), to quantize them
  const float unit, factor, factor_y;
  int first_column = 0;                // of the slab
  float largest = 0, totals[COLUMNS / 4] = {};
  uint4 of_h[2][PIECES];

  __device__ u64 mine(int row) const {  // this thread's first number of a tile
    const Place place = my_place();
    return static_cast<u64>(row + place.warp * 16 + place.g * 2) * N + (first_column + place.q * 8);
  }
  __device__ void begin(int slab) {
    first_column = slab * COLUMNS;
#pragma unroll
    for (float& total : totals) total = 0;
  }

  // h is loaded while the tile is multiplied.
  __device__ void prepare(int row) {
    const u16* from = h + mine(row);
#pragma unroll
    for (int s = 0; s < 2; ++s, from += N)
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        uint4& to = of_h[s][piece];
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(from + piece * 32));
      }
  }

  __device__ void finish(int row, const float (&sums)[SUMS]) {
    u8* to = q + mine(row);
    u32 words[PIECES][4], words_y[PIECES][4];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      const uint4 upper = of_h[0][piece], lower = of_h[1][piece];
      const u32 pairs[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* four = sums + (piece * 4 + k) * 4;
        float d[4], y[4];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          d[s * 2] = four[s * 2] * gelu_slope(low(pairs[s][k]), y[s * 2]);
          d[s * 2 + 1] = four[s * 2 + 1] * gelu_slope(high(pairs[s][k]), y[s * 2 + 1]);
        }
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(d[0]), fabsf(d[1])), fmaxf(fabsf(d[2]), fabsf(d[3]))));
        totals[piece * 8 + k * 2] += d[0] + d[2];
        totals[piece * 8 + k * 2 + 1] += d[1] + d[3];
        words[piece][k] = fp8(d[0] * factor, d[2] * factor, d[1] * factor, d[3] * factor);
        words_y[piece][k] = e4m3(y[0] * factor_y, y[2] * factor_y, y[1] * factor_y, y[3] * factor_y);
      }
      const u32(&w)[4] = words[piece];
      *reinterpret_cast<uint2*>(to + piece * 32) =
          make_uint2(__byte_perm(w[0], w[1], 0x6420), __byte_perm(w[2], w[3], 0x6420));
      *reinterpret_cast<uint2*>(to + N + piece * 32) =
          make_uint2(__byte_perm(w[0], w[1], 0x7531), __byte_perm(w[2], w[3], 0x7531));
    }
    store_columns(qt, row, words);
    store_columns(yt, row, words_y);
  }

  // A tile's words, two rows by two columns each, to their columns of `to` [N, M].
  __device__ void store_columns(u8* to, int row, const u32 (&words)[PIECES][4]) {
    const Place place = my_place();
    const u32 turned = shared(memory.turned[place.group]), into = turned + waiting(column_to_place(), place.warp);
    meet(2 + place.group, 128);  // the threads before have read their part
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) store_turned(into + piece * PIECE, words[piece]);
    meet(2 + place.group, 128);
    const int column = place.thread / 4, part = place.thread % 4;
    const u32 from = turned + waiting(column, part);
    to += static_cast<u64>(first_column + column) * M + (row + part * 16);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece, to += static_cast<u64>(32) * M)
      *reinterpret_cast<uint4*>(to) = load_shared(from + piece * PIECE);
  }

  // The block's sums of this slab, in a fixed order; zeros for parts without a block.
  __device__ void end(const Run& run, int tiles, int tiles_down) {
    constexpr int CONSUMERS = 128 * WARPGROUPS, WARPS = 4 * WARPGROUPS;
    const Place place = my_place();
    float(*scratch)[COLUMNS] = reinterpret_cast<float(*)[COLUMNS]>(memory.turned);
    static_assert(sizeof(memory.turned) >= sizeof(float) * WARPS * COLUMNS, "room for each warp's sums");
    meet(1, CONSUMERS);
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) totals[i] += __shfl_xor_sync(~0u, totals[i], mask);
      if (place.g == i % 8) scratch[threadIdx.x / 32][i / 8 * 32 + place.q * 8 + i % 8] = totals[i];
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

// map: of a [M, K]; b: [N, K]; h: bfloat16 [M, N]; q: [M, N]; qt and yt: [N, M]; sums_out: [parts, N].
extern "C" __global__ void __launch_bounds__(THREADS, 1) product_gelu_backward(
    const __grid_constant__ TensorMap map, const u8* __restrict__ b, const u16* __restrict__ h, u8* __restrict__ q,
    u8* __restrict__ qt, u8* __restrict__ yt, float* __restrict__ sums_out, const float* __restrict__ a_scale_inv,
    const float* __restrict__ b_scale_inv, const float* __restrict__ scale, const float* __restrict__ scale_y,
    float* __restrict__ amax, int M, int N, int parts) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  Memory& memory = *reinterpret_cast<Memory*>(shared_memory);
  const float unit = *a_scale_inv * *b_scale_inv;
  GeluBackward epilogue{memory, h, q, qt, yt, sums_out, amax, M, N, parts, unit, unit * *scale, *scale_y};
  run_product(memory, &map, b, M, N, epilogue);
}
