"""The fused multiply-add of the machine, or of its library, in compiled functions: rounded once."""

from __future__ import annotations

from typing import Any

from numba.extending import intrinsic


def _fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Type of `fma`, and what writes its code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # LLVM's intrinsic: an instruction of the machine if it has one, else a call of the C library
        return builder.fma(*arguments)

    return a(a, b, c), generate


fma: Any = intrinsic(_fma)
"""a * b + c, in the precision of the three."""
