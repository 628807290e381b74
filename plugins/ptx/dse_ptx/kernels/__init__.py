"""Kernels in CUDA C and Triton, and their PTX."""
