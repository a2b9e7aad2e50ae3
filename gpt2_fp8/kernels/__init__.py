"""Kernels in Triton, and cuBLASLt called directly, where no library has what is needed."""
