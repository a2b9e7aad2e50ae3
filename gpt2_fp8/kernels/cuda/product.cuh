// FP8 GEMMs with an epilogue: out = epilogue(a b^T).
//
// a: [M, K], b: [N, K], both FP8 and row-major. A persistent block keeps COLUMNS rows of b, a slab, in shared memory.
// Each of its WARPGROUPS of 128 threads takes one tile of ROWS rows of a after the other. The tiles come from the
// group's own ring, which the copy engine fills (one producer warp a ring). While one group multiplies, others run
// their epilogues. Tiles are counted slab by slab, and a block has a run of them.
//
// What a thread holds of a tile (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk32): with g = lane / 4 and q =
// lane % 4, accumulator 4 i + 2 s + e is of row 16 warp + 8 s + g, column 8 i + 2 q + e. Rows of a and of b are
// permuted in shared memory, so that a thread has two neighbouring rows, and in each of them PIECES runs of PIECE
// columns: row 16 warp + 2 g + s and column 64 (i / 8) + 16 q + 2 (i % 8) + e. So results of one byte are written 16
// bytes at a time.

// LINE bytes of a row are copied and multiplied together; shared memory is swizzled by it.

constexpr int PIECE = 16, SPAN = 4 * PIECE, PIECES = COLUMNS / SPAN, SUMS = COLUMNS / 2;
constexpr int LINES = K / LINE, CHUNK = ROWS * LINE, SLAB = COLUMNS * LINE;
constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int PRODUCER_REGISTERS = 24, REGISTERS = 160;
static_assert(K % LINE == 0, "whole lines");

#include "ring.cuh"
#include "tensor_core.cuh"

// The content of shared memory; swizzled tiles begin at multiples of 1,024 bytes.
struct Memory {
  u8 slab[LINES][SLAB];
  u8 ring[WARPGROUPS][STAGES][CHUNK];
  u64 full[WARPGROUPS][STAGES], empty[WARPGROUPS][STAGES];
};

// Where a thread is, in its warp group and in a tile.
struct Place {
  int group, warp, g, q;
};
__device__ __forceinline__ Place my_place() {
  // the shuffle tells the compiler that it is uniform
  const int thread = threadIdx.x % 128, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  return {warp / 4, warp % 4, thread % 32 / 4, thread % 4};
}

// A run: those of a block's tiles that belong to one slab.
struct Run {
  int slab, first, last;  // tiles first .. last - 1 of all
};
__device__ __forceinline__ int first_tile(int block, int tiles) {
  return static_cast<int>(static_cast<long long>(block) * tiles / gridDim.x);
}
__device__ __forceinline__ int block_of(int tile, int tiles) {
  return static_cast<int>((static_cast<long long>(tile + 1) * gridDim.x - 1) / tiles);
}
__device__ __forceinline__ Run next_run(int first, int tiles, int tiles_down) {
  const int slab = first / tiles_down;
  return {slab, first, min(first_tile(blockIdx.x + 1, tiles), (slab + 1) * tiles_down)};
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(barrier)) : "memory");
}

// One line of a tile of a. See `product.py` for the order of the map's dimensions.
__device__ __forceinline__ void fetch_tile(u8* to, const TensorMap* map, int line, int tile, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];"
      ::"r"(shared(to)), "l"(map), "r"(line * LINE), "r"(0), "r"(tile * (ROWS / 16)), "r"(shared(barrier))
      : "memory");
}

// The whole work of a producer warp: load the tiles of its warp group, line after line.
__device__ __forceinline__ void produce(Memory& memory, const TensorMap* map, int group, int tiles, int tiles_down) {
  Cursor cursor;
  const int end = first_tile(blockIdx.x + 1, tiles);
  for (Run run = {0, 0, first_tile(blockIdx.x, tiles)}; run.last < end;) {
    run = next_run(run.last, tiles, tiles_down);
    for (int tile = run.first + group; tile < run.last; tile += WARPGROUPS)
      for (int line = 0; line < LINES; ++line, cursor.advance()) {
        u64* full = &memory.full[group][cursor.stage];
        await(&memory.empty[group][cursor.stage], cursor.parity ^ 1);
        announce(full, CHUNK);
        fetch_tile(memory.ring[group][cursor.stage], map, line, tile - run.slab * tiles_down, full);
      }
  }
}

// Load a slab of b into shared memory, by all consumers together; none of them still needs the slab before.
__device__ __forceinline__ void load_slab(Memory& memory, const u8* __restrict__ b, int slab) {
  constexpr int PARTS = LINE / 16;
  meet(1, CONSUMERS);
  for (int i = threadIdx.x; i < LINES * COLUMNS * PARTS; i += CONSUMERS) {
    const int part = i % PARTS, row = i / PARTS % COLUMNS, line = i / PARTS / COLUMNS;
    const int column = row / SPAN * SPAN + row % 8 / 2 * PIECE + row / 8 % (PIECE / 2) * 2 + row % 2;
    const u8* from = b + static_cast<u64>(slab * COLUMNS + column) * K + line * LINE + part * 16;
    *reinterpret_cast<uint4*>(memory.slab[line] + row * LINE + (part ^ row % 8) * 16) =
        *reinterpret_cast<const uint4*>(from);
  }
  publish();
  meet(1, CONSUMERS);
}

// Multiply one tile.
__device__ __forceinline__ void multiply_tile(Memory& memory, int group, Cursor& cursor, float (&sums)[SUMS]) {
  const bool leader = threadIdx.x % 32 == 0;
#pragma unroll
  for (float& sum : sums) sum = 0;
  settle(sums);
  int before = 0;
#pragma unroll 1
  for (int line = 0; line < LINES; ++line) {
    await(&memory.full[group][cursor.stage], cursor.parity);
    const u64 a = descriptor(memory.ring[group][cursor.stage]), b = descriptor(memory.slab[line]);
    begin_multiplying();
#pragma unroll
    for (int k = 0; k < LINE / 32; ++k) multiply(sums, a + 2 * k, b + 2 * k);
    end_group();
    await_groups<1>();
    if (leader && line > 0) arrive(&memory.empty[group][before]);
    before = cursor.stage;
    cursor.advance();
  }
  await_groups<0>();
  settle(sums);
  if (leader) arrive(&memory.empty[group][before]);
}

// The whole work of a block. `Epilogue` has begin(slab), prepare(row), finish(row, sums), end(run, tiles, tiles_down)
// and last().
template <class Epilogue>
__device__ __forceinline__ void run_product(Memory& memory, const TensorMap* map, const u8* __restrict__ b, int M, int N,
                                            Epilogue& epilogue) {
  const Place place = my_place();
  const int tiles_down = M / ROWS, tiles = tiles_down * (N / COLUMNS);
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPGROUPS; ++i)
      for (int stage = 0; stage < STAGES; ++stage) {
        make(&memory.full[i][stage]);
        make(&memory.empty[i][stage], 4);  // a warp each
      }
    publish_barriers();
  }
  __syncthreads();
  if (place.group == WARPGROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (place.warp < WARPGROUPS && threadIdx.x % 32 == 0) produce(memory, map, place.warp, tiles, tiles_down);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  Cursor cursor;
  const int end = first_tile(blockIdx.x + 1, tiles);
  for (Run run = {0, 0, first_tile(blockIdx.x, tiles)}; run.last < end;) {
    run = next_run(run.last, tiles, tiles_down);
    load_slab(memory, b, run.slab);
    epilogue.begin(run.slab);
    for (int tile = run.first + place.group; tile < run.last; tile += WARPGROUPS) {
      const int row = (tile - run.slab * tiles_down) * ROWS;
      float sums[SUMS];
      epilogue.prepare(row);
      multiply_tile(memory, place.group, cursor, sums);
      epilogue.finish(row, sums);
    }
    epilogue.end(run, tiles, tiles_down);
  }
  epilogue.last();
}
