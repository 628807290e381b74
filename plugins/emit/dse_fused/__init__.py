"""Operators fused with their collectives (arXiv:2305.06942) for PyTorch: each is one persistent Triton kernel.

Workgroups take slices of the output in turn, those for other ranks first, store results in the peers' memory (zero
copy), note in a bitmask that a slice is done, and the last one of a rank's slices raises the flag that the rank waits
for. On GPUs peers' memory is symmetric memory; on a CPU ranks are processes, memory is shared, and Triton interprets
the kernels (`TRITON_INTERPRET=1` before this is imported).
"""

from dse_fused.operators import (
    Slices,
    embedding_all_to_all,
    gemm_all_to_all,
    gemm_reduce_scatter,
    gemv_all_reduce,
)

__all__ = ["Slices", "embedding_all_to_all", "gemm_all_to_all", "gemm_reduce_scatter", "gemv_all_reduce"]
