// GELU in its tanh form and its derivative. See `activation.py` for the arithmetic.

constexpr bool KEEPS_CODES = true;

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

// z = gelu(h), and the code of gelu'(h).
__device__ __forceinline__ u32 activate(float h, float& z) { return to_code(gelu_slope(h, z)); }

// CODES gelu', from one byte of a word; and its unit.
__device__ __forceinline__ float slope_of(u32 codes, int byte) {
  return __uint_as_float(__byte_perm(codes, __float_as_uint(BIT), 0x7440 + byte)) - (BIT + CODE_OF_ZERO);
}
__device__ __forceinline__ float unit_of_slope(const float*) { return 1.f / CODES; }
