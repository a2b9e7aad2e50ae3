// What kernels share in which a block makes one tile of TILE rows by TILE columns, in both layouts.
//
// A block so writes whole lines of 128 bytes in both outputs. A warp has 16 of the rows, a lane four of the columns. A
// lane's 16 rows of a column are 16 bytes of the transpose. They go through shared memory, so that neighbouring lanes
// write neighbouring bytes.

constexpr int LANE = 4, ROWS = 16, PIECES = TILE / ROWS;
static_assert(TILE == 128 && THREADS == 32 * PIECES, "a warp has 16 rows, a lane 4 columns");

// The first row and column of this block's tile. Tiles are taken row by row: bands of several rows were 1 to 3 %
// slower.
__device__ __forceinline__ int2 origin(int N) {
  const u32 across = (N + TILE - 1) / TILE;
  return make_int2(blockIdx.x / across * TILE, blockIdx.x % across * TILE);
}

// Where 16 rows of a column wait in shared memory, in units of 16 bytes. Eight lanes use all 32 banks, whether they
// write a piece of every fourth column or read the eight pieces of one column.
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
