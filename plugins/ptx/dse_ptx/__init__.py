"""Kernels in PTX: their instructions executed by lanes of warps, and timed on the SMs of a GPU."""
