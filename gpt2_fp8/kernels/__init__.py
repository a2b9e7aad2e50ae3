"""Triton kernels, where no library has what is needed. They are imported only on a CUDA device."""
