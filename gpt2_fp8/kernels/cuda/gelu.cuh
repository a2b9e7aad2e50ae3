// GELU in its tanh form and its derivative. See `gelu.py` for the arithmetic.

constexpr double FACTOR = -2.302208198144325;  // -2 sqrt(2/pi) log2(e)
constexpr double CUBIC = 0.044715;
constexpr double TWICE_ROOT = 1.5957691216057308;  // 2 sqrt(2/pi)

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sigmoid(float x, float square) {  // of 2 u
  return reciprocal(1 + power_of_two(x * fmaf(float(FACTOR * CUBIC), square, float(FACTOR))));
}

// gelu'(x), and gelu(x) itself.
__device__ __forceinline__ float gelu_slope(float x, float& y) {
  const float square = fminf(x * x, 1e6f);  // s is 0 or 1 long before this, and an infinite square would give 0 * inf
  const float s = sigmoid(x, square), slope = fmaf(float(3 * CUBIC * TWICE_ROOT), square, float(TWICE_ROOT));
  y = x * s;
  return fmaf(fmaf(-y, s, y), slope, s);
}

// gelu' lies between -0.1290 and 1.1290. Its code is CODES gelu' + CODE_OF_ZERO, rounded: 202 and 26 give 0 to 254, with
// 0 (26) and 1 (228) exact.
// NaN has 255, which is read as 1.13: by then gelu(x), NaN as well, has spoilt the loss.
constexpr float BIT = 8388608;  // 2^23: to this added, a unit is the lowest bit

__device__ __forceinline__ u32 to_code(float slope) {  // in the lowest byte
  return __float_as_uint(fmaf(slope, CODES, BIT + CODE_OF_ZERO));
}
__device__ __forceinline__ u32 pack_codes(const u32 (&code)[4]) {
  return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
}
__device__ __forceinline__ float codes_of_slope(u32 codes, int byte) {  // CODES gelu', from one byte of a word
  return __uint_as_float(__byte_perm(codes, __float_as_uint(BIT), 0x7440 + byte)) - (BIT + CODE_OF_ZERO);
}
