// What kernels share of which a block makes one tile of TILE rows by TILE columns, in both layouts.
//
// A block so fills whole lines of 128 bytes of either output. A warp has 16 of the rows, a lane four of the columns. A
// lane's 16 rows of a column are 16 bytes of the transpose; they go through shared memory, so that neighbouring lanes
// write neighbours.

constexpr int LANE = 4, ROWS = 16, PIECES = TILE / ROWS;
static_assert(TILE == 128 && THREADS == 32 * PIECES, "a warp has 16 rows, a lane 4 columns");

// The first row and column of this block's tile. Tiles are walked row by row.
__device__ __forceinline__ int2 origin(int N) {
  const u32 across = (N + TILE - 1) / TILE;
  return make_int2(blockIdx.x / across * TILE, blockIdx.x % across * TILE);
}

// Where 16 rows of a column wait in shared memory, in units of 16 bytes. Eight lanes that read the eight pieces of one
// column meet all 32 banks. So do the 32 lanes that write four rows (one word) of every fourth column, since the words
// of a piece change places too: word `g` is at g ^ column / 32.
__device__ __forceinline__ int place(int column, int piece) {
  return column * PIECES + (piece ^ column / LANE % PIECES);
}

// Four columns of four rows -> the four rows of these columns.
__device__ __forceinline__ uint4 turned(u32 a, u32 b, u32 c, u32 d) {
  const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  const u32 ab_below = __byte_perm(a, b, 0x7362), cd_below = __byte_perm(c, d, 0x7362);
  return make_uint4(__byte_perm(ab, cd, 0x5410), __byte_perm(ab, cd, 0x7632), __byte_perm(ab_below, cd_below, 0x5410),
                    __byte_perm(ab_below, cd_below, 0x7632));
}

// Four columns of four rows to their four rows of `to`, whose rows are N bytes long.
__device__ __forceinline__ void store_rows(u8* to, int N, u32 a, u32 b, u32 c, u32 d) {
  const uint4 rows = turned(a, b, c, d);
  *reinterpret_cast<u32*>(to) = rows.x;
  *reinterpret_cast<u32*>(to + static_cast<u64>(N)) = rows.y;
  *reinterpret_cast<u32*>(to + 2 * static_cast<u64>(N)) = rows.z;
  *reinterpret_cast<u32*>(to + 3 * static_cast<u64>(N)) = rows.w;
}

// Four rows (number `g` of a warp's four fours) of a lane's columns to shared memory. After a barrier, all of the block
// to `to` [N, M].
__device__ __forceinline__ void keep(uint4* pieces, int g, u32 a, u32 b, u32 c, u32 d) {
  const int lane = threadIdx.x % 32;
  u32* to = reinterpret_cast<u32*>(pieces + place(lane * LANE, threadIdx.x / 32)) + (g ^ lane * LANE / 32);
  to[0] = a, to[4 * PIECES] = b, to[8 * PIECES] = c, to[12 * PIECES] = d;
}
__device__ __forceinline__ void store_columns(u8* to, const uint4* pieces, int2 first, int M, int N) {
  const int p = threadIdx.x % PIECES, row = first.x + p * ROWS;
#pragma unroll
  for (int k = 0; k < TILE / 32; ++k) {
    const int c = k * 32 + threadIdx.x / PIECES;
    if (row >= M || first.y + c >= N) continue;
    const uint4 piece = pieces[place(c, p)];
    const u32 w[4] = {piece.x, piece.y, piece.z, piece.w};
    *reinterpret_cast<uint4*>(to + static_cast<u64>(first.y + c) * M + row) =
        make_uint4(w[k], w[1 ^ k], w[2 ^ k], w[3 ^ k]);
  }
}

// What the warps of a block know of their rows: the largest magnitude, and the sums of the columns.
struct __align__(16) Known {
  float sums[PIECES][TILE], largest[PIECES];
};

// Each warp tells; after a barrier, one raises `amax`, and others write the block's sums. The order of summation is
// fixed, so the result is the same every time.
__device__ __forceinline__ void tell(Known& known, float largest, const float (&sums)[LANE], bool with_sums) {
  const u32 bits = __reduce_max_sync(~0u, __float_as_uint(largest));
  if (threadIdx.x % 32 == 0) known.largest[threadIdx.x / 32] = __uint_as_float(bits);
  if (with_sums) store(known.sums[threadIdx.x / 32] + threadIdx.x % 32 * LANE, sums);
}
__device__ __forceinline__ void finish(const Known& known, float* amax, float* sums_out, int2 first, int N,
                                       bool with_sums) {
  if (threadIdx.x < 32) record(amax, threadIdx.x < PIECES ? known.largest[threadIdx.x] : 0);
  const int c = static_cast<int>(threadIdx.x) - (THREADS - TILE);
  if (!with_sums || c < 0 || first.y + c >= N) return;
  float sum = 0;
#pragma unroll
  for (int p = 0; p < PIECES; ++p) sum += known.sums[p][c];
  sums_out[static_cast<u64>(first.x / TILE) * N + first.y + c] = sum;
}
