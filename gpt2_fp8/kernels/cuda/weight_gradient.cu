// A weight gradient: out = a^T b [+ add], float32 [N, D], or its transpose if TRANSPOSED. a [M, N] is FP8 as it is, and
// bt [D, M] is b transposed.
//
// Hopper reads FP8 from shared memory only with the summed dimension (M) contiguous. But the first operand may come from
// registers. ldmatrix turns pairs of bytes, and a byte permutation puts four numbers along M of one column into a word.
//
// A tile is ROWS columns of a by COLUMNS of b. A block has two warp groups (half of the rows each) and a producer. The
// CLUSTER blocks of a cluster have neighbouring columns of a and the same of b: each loads a share of b for all. A
// cluster multiplies a list of segments, each a part of M for one tile (`weight_gradient.py`). The sums of most go through
// memory. The tile's owner adds them in the order of their slots, so the result is always the same.
//
// The tensor cores' own sums have few bits. So those of BLOCK numbers are added to float32 sums in registers, PART
// columns at a time, while the next part is multiplied. What is outside of a or bt is loaded as zeros.

constexpr int A_BYTES = BLOCK * ROWS, B_BYTES = COLUMNS * BLOCK, SHARE = COLUMNS / CLUSTER;
constexpr int PART = 64, PARTS = COLUMNS / PART, SUMS = PART / 2;  // SUMS: of a part, in a thread
constexpr int STEPS = BLOCK / 32;                                  // matrix instructions of a part of a block
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int PRODUCER_REGISTERS = 24, REGISTERS = 240;

#include "ring.cuh"
#include "tensor_core.cuh"

struct Memory {
  u8 a[STAGES][A_BYTES];  // [M, columns of a]
  u8 b[STAGES][B_BYTES];  // [columns of b, M]
  u64 full[STAGES], empty[STAGES];
};

struct Segment {
  int row, column;  // the cluster's first column of a, and of b
  int first, last;  // blocks of M
  int slot;         // where its sums wait; -1: it is the owner's
  int from, count;  // the owner's: the slots to add
  int tile;
};

__device__ __forceinline__ u32 rank_in_cluster() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}

// A box at x (contiguous) and y of a map; to the same place of all blocks of the cluster.
__device__ __forceinline__ void fetch_box(u8* to, const TensorMap* map, int x, int y, u64* barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(shared(to)), "l"(map), "r"(x), "r"(y), "r"(shared(barrier)) : "memory");
}
__device__ __forceinline__ void fetch_box_for_all(u8* to, const TensorMap* map, int x, int y, u64* barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(shared(to)), "l"(map), "r"(x), "r"(y), "r"(shared(barrier)),
               "h"(static_cast<u16>((1 << CLUSTER) - 1)) : "memory");
}

// A warp has read a stage: its first lanes tell the barriers of all blocks that loaded it. Nothing was written, so the
// order of a cluster (".release.cluster") is not needed: it would be a fence of the whole GPU.
__device__ __forceinline__ void release(Memory& memory, int stage) {
  const u32 lane = threadIdx.x % 32;
  if (lane < CLUSTER)
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
                 " mbarrier.arrive.shared::cluster.b64 _, [there];}"
                 ::"r"(shared(&memory.empty[stage])), "r"(lane) : "memory");
}

// The whole work of the producer.
__device__ __forceinline__ void produce(Memory& memory, const TensorMap* map_a, const TensorMap* map_b,
                                        const Segment* segment, const Segment* end, u32 rank) {
  Cursor cursor;
  for (; segment < end; ++segment) {
    const int row = segment->row + rank * ROWS, column = segment->column + rank * SHARE, last = segment->last;
    for (int block = segment->first; block < last; ++block, cursor.advance()) {
      u64* full = &memory.full[cursor.stage];
      await(&memory.empty[cursor.stage], cursor.parity ^ 1);
      announce(full, A_BYTES + B_BYTES);
      fetch_box(memory.a[cursor.stage], map_a, row, block * BLOCK, full);
      fetch_box_for_all(memory.b[cursor.stage] + rank * (SHARE * BLOCK), map_b, block * BLOCK, column, full);
    }
  }
}

// How a thread reads a. With lane = 4 g + q, one ldmatrix.x4 gives it, of columns 2 g and 2 g + 1 of its warp's 16, four
// pairs of neighbouring rows: (4 q, 4 q + 1), (4 q + 2, 4 q + 3), and the same 16 rows below; for q > 1 the first and the
// second are exchanged, as well as the third and the fourth. So the eight rows of a matrix are in eight different places
// of the 128-byte swizzle, and without bank conflicts.
struct Reader {
  u32 offset, even;  // of the lane's address; byte selectors of column 2 g
  __device__ __forceinline__ Reader(int warp, int lane) {
    const int matrix = lane / 8, pair = lane % 8 / 2, second = (matrix % 2) ^ (pair / 2);
    const int row = matrix / 2 * 16 + pair * 4 + second * 2 + lane % 2;
    offset = row * ROWS + (warp ^ row % 8) * 16;
    even = lane % 4 < 2 ? 0x6420 : 0x2064;
  }
  // 32 rows.
  __device__ __forceinline__ void load(u32 (&a)[4], u32 from) const {
    u32 w, x, y, z;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w), "=r"(x), "=r"(y), "=r"(z) : "r"(from + offset) : "memory");
    const u32 odd = even + 0x1111;  // of column 2 g + 1
    a[0] = __byte_perm(w, x, even), a[1] = __byte_perm(w, x, odd);
    a[2] = __byte_perm(y, z, even), a[3] = __byte_perm(y, z, odd);
  }
};

// Wait for the stage at the cursor, and read its part of a.
__device__ __forceinline__ void load_fragments(Memory& memory, const Reader& reader, const Cursor& cursor,
                                               u32 (&a)[STEPS][4]) {
  await(&memory.full[cursor.stage], cursor.parity);
  const u32 from = shared(memory.a[cursor.stage]);
#pragma unroll
  for (int k = 0; k < STEPS; ++k) reader.load(a[k], from + k * 32 * ROWS);
}

// Begin to multiply one part of a block.
__device__ __forceinline__ void multiply_part(float (&temp)[SUMS], const u32 (&a)[STEPS][4], u64 b) {
  settle(temp);
  begin_multiplying();
  multiply<0>(temp, a[0], b);
#pragma unroll
  for (int k = 1; k < STEPS; ++k) multiply<1>(temp, a[k], b + 2 * k);
  end_group();
}
__device__ __forceinline__ void promote(float (&sums)[SUMS], float (&temp)[SUMS]) {
  settle(temp);
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] += temp[i];
  settle(sums);
}

// Multiply the block at the cursor, whose fragments are in `a`, and load the next one's meanwhile if there are `more`.
// The last part's sums stay in `temp`: they are added while the next block is multiplied. LAST: nothing is under way in
// the end. AFTER: the block before, of stage `before`, may be under way. (ptxas does not follow that over a loop's end.)
template <bool AFTER, bool LAST>
__device__ __forceinline__ void multiply_block(Memory& memory, const Reader& reader, Cursor& cursor, int& before,
                                               bool more, const u32 (&a)[STEPS][4], u32 (&next)[STEPS][4],
                                               float (&temp)[2][SUMS], float (&sums)[PARTS][SUMS]) {
  const int here = cursor.stage;
  const u64 b = descriptor(memory.b[here]);
  cursor.advance();
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    multiply_part(temp[part % 2], a, b + part * (PART * BLOCK / 16));
    await_groups<1>();
    if (AFTER && part == 0) release(memory, before);
    promote(sums[(part + PARTS - 1) % PARTS], temp[(part + 1) % 2]);
  }
  if (more) load_fragments(memory, reader, cursor, next);
  if (LAST) {
    await_groups<0>();
    release(memory, here);
  }
  before = here;
}

// The sums of one segment. Accumulator 4 i + 2 s + e of a part is of column 2 g + s of a (of the warp's 16), and of
// column 8 i + 2 q + e of b.
__device__ __forceinline__ void multiply_segment(Memory& memory, const Reader& reader, Cursor& cursor, int blocks,
                                                 float (&sums)[PARTS][SUMS]) {
  float temp[2][SUMS] = {};
#pragma unroll
  for (auto& part : sums)
#pragma unroll
    for (float& sum : part) sum = 0;
  u32 a[2][STEPS][4];
  int before = 0;
  load_fragments(memory, reader, cursor, a[0]);
#pragma unroll 1
  for (; blocks >= 2; blocks -= 2) {
    multiply_block<false, false>(memory, reader, cursor, before, true, a[0], a[1], temp, sums);
    multiply_block<true, true>(memory, reader, cursor, before, blocks > 2, a[1], a[0], temp, sums);
  }
  // A last odd block. It could be without a loop, but then ptxas spills registers in the loop above.
#pragma unroll 1
  for (int block = 0; block < blocks; block += 2) {
    multiply_block<false, true>(memory, reader, cursor, before, block + 1 < blocks, a[0], a[1], temp, sums);
    if (block + 1 == blocks) break;
    multiply_block<false, true>(memory, reader, cursor, before, block + 2 < blocks, a[1], a[0], temp, sums);
  }
  promote(sums[PARTS - 1], temp[1]);
}

// Leave a segment's sums for the tile's owner.
__device__ __forceinline__ void leave(float4* to, u32* arrived, const float (&sums)[PARTS][SUMS]) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
      __stcg(to + (part * SUMS + i) / 4 * CONSUMERS + threadIdx.x,
             make_float4(sums[part][i], sums[part][i + 1], sums[part][i + 2], sums[part][i + 3]));
  __threadfence();
  meet(1, CONSUMERS);
  if (threadIdx.x == 0) atomicAdd(arrived, 1);
}

// Add others' sums to the owner's.
__device__ __forceinline__ void collect(const float4* from, int count, const u32* arrived, float (&sums)[PARTS][SUMS]) {
  if (threadIdx.x == 0) {
    u32 here = 0;
    while (here < count) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(here) : "l"(arrived) : "memory");
    __threadfence();
  }
  meet(1, CONSUMERS);
#pragma unroll 1
  for (int slot = 0; slot < count; ++slot, from += CLUSTER * (ROWS * COLUMNS / 4)) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < SUMS; i += 4) {
        const float4 four = __ldcg(from + (part * SUMS + i) / 4 * CONSUMERS + threadIdx.x);
        sums[part][i] += four.x, sums[part][i + 1] += four.y, sums[part][i + 2] += four.z, sums[part][i + 3] += four.w;
      }
  }
}

// Ask for the lines of `add` that this block will need, from a tile's first row and column on.
__device__ __forceinline__ void expect(const float* add, int row, int column, int N, int D) {
  constexpr int LINES = ROWS * COLUMNS * 4 / 128, ACROSS = (TRANSPOSED ? ROWS : COLUMNS) * 4 / 128;
  for (int i = threadIdx.x; i < LINES; i += CONSUMERS) {
    const int down = i / ACROSS, across = i % ACROSS * 32;
    const int r = row + (TRANSPOSED ? across : down), c = column + (TRANSPOSED ? down : across);
    const float* at = TRANSPOSED ? add + static_cast<u64>(c) * N + r : add + static_cast<u64>(r) * D + c;
    if (c < D) asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
  }
}

// Write a tile. row, column: this thread's first. ADD: to `add`, which may be `out`.
template <bool ADD>
__device__ __forceinline__ void write(float* out, const float* add, int row, int column, int N, int D, float unit,
                                      const float (&sums)[PARTS][SUMS]) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    if (column + part * PART >= D) return;
    float2 old[SUMS / 2];  // loads before the first store, since stores could change what is loaded
    u64 at[SUMS / 2];
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i) {
      const int c = column + part * PART + i / 2 * 8, j = i % 2;  // j: the row or the column, of two
      at[i] = TRANSPOSED ? static_cast<u64>(c + j) * N + row : static_cast<u64>(row + j) * D + c;
      if (ADD) old[i] = __ldcg(reinterpret_cast<const float2*>(add + at[i]));
    }
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i) {
      const float* four = sums[part] + i / 2 * 4;
      const int j = i % 2;
      float2 two = TRANSPOSED ? make_float2(four[j], four[2 + j]) : make_float2(four[j * 2], four[j * 2 + 1]);
      if (ADD) two.x = fmaf(two.x, unit, old[i].x), two.y = fmaf(two.y, unit, old[i].y);
      else two.x *= unit, two.y *= unit;
      *reinterpret_cast<float2*>(out + at[i]) = two;
    }
  }
}

// map_a: boxes of BLOCK rows by ROWS columns of a [M, N]; map_b: of SHARE rows by BLOCK columns of bt [D, M]; N and D are
// multiples of 128. segments of cluster c: starts[c] .. starts[c + 1] - 1. waiting: room for the slots' sums. arrived:
// zeros, one a tile and block of a cluster. out, add: [N, D], or [D, N] if TRANSPOSED; add: may be `out`, or null.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1) weight_gradient(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const Segment* segments,
    const int* __restrict__ starts, float4* waiting, u32* arrived, float* out, const float* add,
    const float* __restrict__ a_scale_inv, const float* __restrict__ b_scale_inv, int N, int D) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  Memory& memory = *reinterpret_cast<Memory*>(shared_memory);
  const u32 rank = rank_in_cluster();
  const int cluster = blockIdx.x / CLUSTER;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      make(&memory.full[stage]);
      make(&memory.empty[stage], CONSUMERS / 32 * CLUSTER);  // a warp each
    }
    publish_barriers();
  }
  __syncthreads();
  meet_cluster();
  if (warp >= CONSUMERS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (warp == CONSUMERS / 32 && lane == 0)
      produce(memory, &map_a, &map_b, segments + starts[cluster], segments + starts[cluster + 1], rank);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    const Reader reader(warp, lane);
    Cursor cursor;
#pragma unroll 1
    for (int index = starts[cluster]; index < __ldcg(starts + cluster + 1); ++index) {  // few registers are left
      const Segment* segment = segments + index;
      float sums[PARTS][SUMS];
      multiply_segment(memory, reader, cursor, segment->last - segment->first, sums);
      u32* here = arrived + segment->tile * CLUSTER + rank;
      const int slot = segment->slot, first_row = segment->row + rank * ROWS, first_column = segment->column;
      if (slot >= 0) {
        leave(waiting + static_cast<u64>(slot * CLUSTER + rank) * (ROWS * COLUMNS / 4), here, sums);
      } else if (first_row < N) {
        if (add) expect(add, first_row, first_column, N, D);
        if (segment->count)
          collect(waiting + static_cast<u64>(segment->from * CLUSTER + rank) * (ROWS * COLUMNS / 4), segment->count, here,
                  sums);
        const int row = first_row + warp * 16 + lane / 4 * 2, column = first_column + lane % 4 * 2;
        const float unit = *a_scale_inv * *b_scale_inv;
        if (add) write<true>(out, add, row, column, N, D, unit, sums);
        else write<false>(out, add, row, column, N, D, unit, sums);
      }
    }
  }
  meet_cluster();  // until here the others may arrive at this block's barriers
}
