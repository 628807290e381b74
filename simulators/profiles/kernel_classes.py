"""Classes of kernels by their names, as compilers and libraries call them.

The first pattern that a name holds decides, whatever its case; a kernel that none fits is `other`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

COLLECTIVE = "collective"
OTHER = "other"
MOVED = ("copy", "fill")
"""Classes of what copy engines, or kernels in their place, do."""

_PATTERNS: Mapping[str, str] = {
    COLLECTIVE: r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|multimem"
    r"|nvshmem|deep_ep|^(cached_)?(dispatch|combine|notify)(_\w+)?$",
    "copy": r"^memcpy|copybuffer",
    "fill": r"^memset|fillbuffer",
    "attention": r"flash|fmha|attention|mha_",
    "grouped GEMM": r"group(ed)?_?gemm|gemm.*group|moe.*gemm",
    "convolution": r"conv(?!ert)|winograd|implicit_gemm|dgrad|wgrad2d|igemm_",
    "GEMM": r"gemm|gemv|cutlass|cublas|cijk_|nvjet|xmma|wgmma|hgmma|matmul",
    "norm": r"norm",
    "softmax": r"softmax",
    "optimizer": r"adam|lamb\b|sgd|multi_tensor_apply",
    "element-wise": r"elementwise|element_wise|copy|cast|add|mul|fill|cat|index|gather|scatter|reduce|transpose|permute"
    r"|activation|gelu|silu|dropout|triton_",
}
_COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}
CLASSES = (*_PATTERNS, OTHER)
"""All classes."""


def kernel_class(name: str) -> str:
    """The class of a kernel.

    >>> kernel_class("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), kernel_class("sm90_xmma_gemm_bf16bf16")
    ('collective', 'GEMM')
    """
    return next((kind for kind, pattern in _COMPILED.items() if pattern.search(name)), OTHER)
