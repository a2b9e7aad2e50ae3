// Squared ReLU, z = r r with r = max(h, 0), and its derivative 2 r. The backward takes r from z's own codes in E4M3, as
// the root of what they stand for: off by at most 2^-5 of itself, half of z's own 2^-4, unless z is subnormal there. So
// r is 0 where z was rounded to 0, and the root of the largest number where z saturated. NaN stays NaN in both.

constexpr bool KEEPS_CODES = false;

// z, exact of an h of bfloat16; there is no code of the slope.
__device__ __forceinline__ u32 activate(float h, float& z) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(h), "f"(0.f));  // fmaxf would make 0 of NaN
  z = r * r;
  return 0;
}

// The root of a code, from one byte of a word; and what 2 r is in this unit.
__device__ __forceinline__ float slope_of(u32 codes, int byte) {
  u32 two;
  float z, root;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(static_cast<u16>(codes >> byte / 2 * 16)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(z) : "h"(static_cast<u16>(two >> byte % 2 * 16)));
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(z));
  return root;
}
__device__ __forceinline__ float unit_of_slope(const float* z_scale_inv) { return 2 * sqrtf(*z_scale_inv); }
