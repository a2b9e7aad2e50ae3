// Hopper's matrix instructions for a tile of ROWS by COLUMNS sums, from lines of LINE bytes in shared memory.

// The descriptor of a tile whose rows are LINE bytes, swizzled: address, 1,024 bytes from eight rows to the next.
__device__ __forceinline__ u64 descriptor(const void* at) {
  return static_cast<u64>((shared(at) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#if GRADIENT_E5M2
#define TYPES "e5m2.e4m3"
#else
#define TYPES "e4m3.e4m3"
#endif

// sums += 32 columns of a times 32 of b, of ROWS and COLUMNS rows.
__device__ __forceinline__ void multiply(float (&sums)[SUMS], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." TYPES
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23,"
      " %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45,"
      " %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, 1, 1, 1;"
      : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void settle(float (&sums)[SUMS]) {  // keeps the compiler from moving or changing them
#pragma unroll
  for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void await_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
