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

__device__ __forceinline__ float gelu(float x) { return x * sigmoid(x, x * x); }

// gelu'(x), and gelu(x) itself.
__device__ __forceinline__ float gelu_slope(float x, float& y) {
  const float square = fminf(x * x, 1e6f);  // s is 0 or 1 long before this, and an infinite square would give 0 * inf
  const float s = sigmoid(x, square), slope = fmaf(float(3 * CUBIC * TWICE_ROOT), square, float(TWICE_ROOT));
  y = x * s;
  return fmaf(fmaf(-y, s, y), slope, s);
}
