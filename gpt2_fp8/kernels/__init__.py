"""Kernels in Triton and CUDA C++, and direct calls of cuBLASLt, where no library offers what is needed."""
