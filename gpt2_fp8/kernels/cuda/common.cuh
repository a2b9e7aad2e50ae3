// What the kernels in CUDA C++ share. Constants in capitals are given by the compilation (`kernels/nvrtc.py`).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Four numbers of bfloat16, or of float32 at a multiple of 16 bytes.
__device__ __forceinline__ void unpack(uint2 pairs, float (&out)[4]) {
  out[0] = low(pairs.x), out[1] = high(pairs.x), out[2] = low(pairs.y), out[3] = high(pairs.y);
}
__device__ __forceinline__ void load(const float* from, float (&out)[4]) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
}
__device__ __forceinline__ void store(float* to, const float (&from)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

__device__ __forceinline__ u32 bfloat16s(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// Four numbers as FP8, the first in the lowest byte. Conversion saturates; NaN stays NaN.
__device__ __forceinline__ u32 e4m3(float a, float b, float c, float d) {
  u32 word;
  asm("{.reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;"
      " mov.b32 %0, {lo, hi};}" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}
__device__ __forceinline__ u32 fp8(float a, float b, float c, float d) {
  if constexpr (E4M3) return e4m3(a, b, c, d);
  u32 word;
  asm("{.reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, %2, %1; cvt.rn.satfinite.e5m2x2.f32 hi, %4, %3;"
      " mov.b32 %0, {lo, hi};}" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

__device__ __forceinline__ u32 shared(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// 2^x; subnormal numbers count as 0.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A barrier that opens when `arrivals` threads and the bytes announced to it have arrived. One bit of parity counts its
// openings.
__device__ __forceinline__ void make(u64* barrier, u32 arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void announce(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(u64* barrier, u32 parity) {
  u32 open = 0;
  while (!open)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(open) : "r"(shared(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void fetch(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared(barrier)) : "memory");
}

// Raise `amax`. Non-negative floats have the same order as their bits.
__device__ __forceinline__ void record(float* amax, float largest) {
  const u32 bits = __reduce_max_sync(~0u, __float_as_uint(largest));
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<u32*>(amax), bits);
}
