// What layer normalisation's two kernels share.
//
// A block owns whole rows, in tiles of TILE and pieces of ROWS. The copy engine (cp.async.bulk) brings whole pieces,
// STAGES of them loaded or being loaded. Every thread then holds four neighbouring columns of all ROWS in registers.
// Sums over a row are made over warps and block; sums over a column stay in its thread to the end.
//
// Four columns by four rows are four words of FP8 in either layout, so bytes need not change threads. A tile's words of
// the transposed layout wait in shared memory. From there neighbouring threads write neighbouring bytes: 32 columns of
// 16 bytes each are a third slower than 8 columns of 64 bytes each.
//
// N, the number of columns, is a constant. N and M, the number of rows, are multiples of 16.

// One step of `over_warp`: lanes whose number has the bit HALF keep the upper HALF values, the others the lower ones,
// and each gives its other half away. It is a recursion: a loop that the compiler does not unroll would put `values` in
// memory.
template <int HALF, int COUNT>
__device__ __forceinline__ void fold(float (&values)[COUNT]) {
  const bool upper = threadIdx.x & HALF;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float one = values[i], other = values[i + HALF];
    values[i] = (upper ? other : one) + __shfl_xor_sync(~0u, upper ? one : other, HALF);
  }
  if constexpr (HALF > 1) fold<HALF / 2>(values);
}

// values[i] of each lane -> in lane l their sum over the warp, for i = l % COUNT.
template <int COUNT>
__device__ __forceinline__ float over_warp(float (&values)[COUNT]) {
  fold<COUNT / 2>(values);
#pragma unroll
  for (int mask = COUNT; mask < 32; mask *= 2) values[0] += __shfl_xor_sync(~0u, values[0], mask);
  return values[0];
}

// The same over the block. `partial` may be written again once every thread has reached the next barrier after this
// one.
template <int COUNT, int WARPS>
__device__ __forceinline__ float over_block(float (&values)[COUNT], float* partial) {
  const int lane = threadIdx.x % 32;
  const float mine = over_warp(values);
  if (lane < COUNT) partial[threadIdx.x / 32 * COUNT + lane] = mine;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) total += partial[warp * COUNT + lane % COUNT];
  return total;
}

__device__ __forceinline__ float of_row(float of_lane, int row) { return __shfl_sync(~0u, of_lane, row); }

// A block takes every gridDim.x-th tile. The last of all may have fewer rows.
__device__ __forceinline__ int tiles_of_block(int M) {
  return ((M + TILE - 1) / TILE - blockIdx.x + gridDim.x - 1) / gridDim.x;
}
__device__ __forceinline__ int row_of_tile(int tile) { return (blockIdx.x + tile * gridDim.x) * TILE; }

// The block's pieces in order, each by its first row.
struct Pieces {
  const int M, tiles;
  int tile = 0, part = 0;
  __device__ Pieces(int M) : M(M), tiles(tiles_of_block(M)) {}
  __device__ int row() const { return row_of_tile(tile) + part * ROWS; }
  __device__ bool none() const { return tile == tiles || row() >= M; }
  __device__ int next() {
    const int here = row();
    if (++part == TILE / ROWS) part = 0, ++tile;
    return here;
  }
};

__device__ __forceinline__ constexpr int round_up(int bytes) { return (bytes + 127) / 128 * 128; }

__device__ __forceinline__ void open_ring(u64 (&full)[STAGES]) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) make(&full[stage]);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine sees them
  }
  __syncthreads();
}

// A tile's FP8 words, each a column of four rows, wait in shared memory as [TILE / 4, WIDTH] until the tile is
// complete. Columns are permuted from one group of 16 rows to the next, four or more at a time. So the 32 words that a
// warp reads at once in `transpose`, of 32 / GROUPS columns and all groups, are in different banks.
constexpr int GROUPS = TILE / 16, WIDTH = (N + 31) / 32 * 32;
__device__ __forceinline__ int place(int word, int column) {
  return word * WIDTH + (column ^ (word / 4 % GROUPS * (32 / GROUPS)));
}

// Store the words of some rows, four at a time, and of the thread's four columns.
template <int COUNT>
__device__ __forceinline__ void keep(u32* words, int word, int column, const float (&v)[COUNT][4]) {
#pragma unroll
  for (int r = 0; r < COUNT; r += 4) {
    auto of_column = [&](int c) { return fp8(v[r][c], v[r + 1][c], v[r + 2][c], v[r + 3][c]); };
    *reinterpret_cast<uint4*>(words + place(word + r / 4, column)) =
        make_uint4(of_column(0), of_column(1), of_column(2), of_column(3));
  }
}

// Write the transpose of a whole tile, from the row `row` on, to `qt` [N, M]: 16 bytes a thread, those of a column by
// neighbouring threads.
__device__ __forceinline__ void transpose(const u32* words, u8* qt, int row, int M) {
  for (int i = threadIdx.x; i < N * GROUPS; i += THREADS) {
    const int column = i / GROUPS, word = i % GROUPS * 4;
    if (row + word * 4 < M)
      *reinterpret_cast<uint4*>(qt + static_cast<u64>(column) * M + row + word * 4) =
          make_uint4(words[place(word, column)], words[place(word + 1, column)], words[place(word + 2, column)],
                     words[place(word + 3, column)]);
  }
}
