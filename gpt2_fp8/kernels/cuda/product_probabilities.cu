// From a b^T, the logits, to probabilities relative to a reference, as E5M2 in both layouts, and their sums by row and
// slab: 2^(EXPONENT + logit log2(e) - reference). Columns from vocab_size on are 0. The logits themselves are never in
// memory, but for one of each row, that of its target.
//
// A tile's transpose is turned in shared memory, in STAGED bytes for each warp group. A word of a thread is two columns
// of two rows, and so a part of a matrix of two-byte elements, each two rows of a column, which stmatrix turns. The copy
// engine writes the tile while the group multiplies its next one.

#include "product.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr int STAGED = ROWS * COLUMNS;

struct StagedMemory {
  u8 staged[WARPGROUPS][STAGED];  // before the rest, which begins at a multiple of 1,024 bytes then
  Memory product;
};

// Four columns of two rows as two words, each of two columns, of which the bytes of both rows are neighbours.
__device__ __forceinline__ void pair_rows(u32 first, u32 second, u32& left, u32& right) {
  left = __byte_perm(first, second, 0x5140), right = __byte_perm(first, second, 0x7362);
}

// Store four matrices of eight by eight two-byte elements, turned: a lane has the address of a column's 16 rows.
__device__ __forceinline__ void store_turned(u32 at, const u32* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

struct Probabilities {
  u8* staged;  // of this warp group
  const TensorMap* turned;
  u8* q;
  float* sums_out;
  const float* references;
  const long long* targets;
  float* at_target;
  const int M, N, vocab_size;
  const float unit;  // of the sums, to logits in powers of two
  int slab = 0;
  float shift[2];
  int target[2];

  __device__ void begin(int of_slab) { slab = of_slab; }
  __device__ int mine(int row) const {
    const Place place = my_place();
    return row + place.warp * 16 + place.g * 2;
  }
  __device__ void prepare(int row) {
    const float2 two = __ldg(reinterpret_cast<const float2*>(references + mine(row)));
    shift[0] = EXPONENT - two.x, shift[1] = EXPONENT - two.y;
    const longlong2 ids = __ldg(reinterpret_cast<const longlong2*>(targets + mine(row)));
    target[0] = static_cast<int>(ids.x), target[1] = static_cast<int>(ids.y);
  }

  // Write the logit of row `first` + s if its target is among this thread's columns, the first of which is `column`. Few
  // threads have one; for them it is searched, since registers cannot be indexed.
  __device__ __forceinline__ void pick(int first, int s, int column, const float (&sums)[SUMS]) {
    const int wanted = target[s] - column;
    if (wanted < 0 || wanted >= COLUMNS || wanted % SPAN >= PIECE) return;
    float found = 0;
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i)  // the thread's columns, in order
      if (wanted == i / PIECE * SPAN + i % PIECE) found = sums[i / 2 * 4 + s * 2 + i % 2];
    at_target[first + s] = found * unit;
  }

  __device__ void finish(int row, const float (&sums)[SUMS]) {
    const bool leader = threadIdx.x % 128 == 0;
    if (leader) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    meet(2 + my_place().group, 128);  // the tile before has left shared memory
    if ((slab + 1) * COLUMNS <= vocab_size)
      finish<true>(row, sums);
    else
      finish<false>(row, sums);
    publish();
    meet(2 + my_place().group, 128);
    if (leader)
      asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %2, %2, %3}], [%4];\n"
                   "cp.async.bulk.commit_group;"
                   ::"l"(turned), "r"(row), "r"(0), "r"(slab * (COLUMNS / SPAN)), "r"(shared(staged)) : "memory");
  }

  // WHOLE: every column counts.
  template <bool WHOLE>
  __device__ __forceinline__ void finish(int row, const float (&sums)[SUMS]) {
    const Place place = my_place();
    const int first = mine(row), column = slab * COLUMNS + place.q * PIECE, lane = threadIdx.x % 32;
    u8* to = q + static_cast<u64>(first) * N + column;
    // Column 16 q + 2 i + e of a span lies in line 8 i + 2 q + e of the staged ones, whose 16-byte parts are swizzled by
    // q (SWIZZLE_64B). This lane's address is of line `lane`.
    const u32 at = shared(staged) + lane * ROWS + (place.warp ^ lane / 2 % 4) * 16;
    pick(first, 0, column, sums), pick(first, 1, column, sums);
    float totals[2] = {};
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      u32 words[2][PIECE / 4];
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int four = 0; four < PIECE / 4; ++four) {
          float p[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float sum = sums[(piece * 8 + four * 2 + k / 2) * 4 + s * 2 + k % 2];
            p[k] = power_of_two(fmaf(sum, unit, shift[s]));
            if (!WHOLE && column + piece * SPAN + four * 4 + k >= vocab_size) p[k] = 0;
          }
          totals[s] += (p[0] + p[1]) + (p[2] + p[3]);
          words[s][four] = fp8(p[0], p[1], p[2], p[3]);
        }
#pragma unroll
      for (int s = 0; s < 2; ++s)
        *reinterpret_cast<uint4*>(to + (s ? N : 0) + piece * SPAN) =
            make_uint4(words[s][0], words[s][1], words[s][2], words[s][3]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 pairs[4];
        pair_rows(words[0][half * 2], words[1][half * 2], pairs[0], pairs[1]);
        pair_rows(words[0][half * 2 + 1], words[1][half * 2 + 1], pairs[2], pairs[3]);
        store_turned(at + (piece * SPAN + half * 32) * ROWS, pairs);
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) totals[s] += __shfl_xor_sync(~0u, totals[s], mask);
    if (place.q == 0)
      *reinterpret_cast<float2*>(sums_out + static_cast<u64>(slab) * M + first) = make_float2(totals[0], totals[1]);
  }

  __device__ void end(const Run&, int, int) {}
  __device__ void last() {
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
};

// map: of a [M, K]; turned: of qt [N, M]; b: [N, K]; q: [M, N]; sums_out: [N / COLUMNS, M]; references, targets: [M];
// at_target: [M], not written where the target is negative.
extern "C" __global__ void __launch_bounds__(THREADS, 1) product_probabilities(
    const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap turned, const u8* __restrict__ b,
    u8* __restrict__ q, float* __restrict__ sums_out, const float* __restrict__ references,
    const long long* __restrict__ targets, float* __restrict__ at_target, const float* __restrict__ a_scale_inv,
    const float* __restrict__ b_scale_inv, int M, int N, int vocab_size) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  StagedMemory& memory = *reinterpret_cast<StagedMemory*>(shared_memory);
  const int group = min(my_place().group, WARPGROUPS - 1);
  Probabilities epilogue{memory.staged[group], &turned, q, sums_out, references, targets, at_target, M, N, vocab_size,
                         *a_scale_inv * *b_scale_inv * LOG2E};
  run_product(memory.product, &map, b, M, N, epilogue);
}
