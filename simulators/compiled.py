"""Compiling kernels with numba: cached on disk, without the interpreter lock, with a place for the cache.

Machine code is kept by the file of the kernel: what a kernel calls must be in the same file.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def compile_lazily(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel compiled on first use, which says so where no machine code is kept yet."""
    return _made(kernel, {})


def flat(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a kernel that makes no arrays: without counting references to those that its parts are given.

    The counts are atomic, and took four fifths of the time of an inner loop of `inline_always` parts.
    """
    return _made(kernel, _FLAT)


def inline_always(part: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a `flat` kernel in the same file, put into it wherever it is used: for inner loops."""
    from numba import njit

    found: Callable[..., Any] = njit(inline="always", **_FLAT)(part)
    return found


def inline_never(part: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a `flat` kernel in the same file that is called: for what is rare."""
    from numba import njit

    found: Callable[..., Any] = njit(**_FLAT)(part)
    return found


_FLAT: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


def _made(kernel: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A compiled kernel.

    Not `fastmath`: bits are the same on every machine. The code is kept beside the module, or in the user's own cache
    folder where that is read-only (never in a shared folder: a cache is code that is run), or nowhere.
    """
    if not os.access(Path(__file__).parent, os.W_OK):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "dse" / "numba"))
    from numba import njit

    try:
        made = njit(cache=True, nogil=True, **options)(kernel)
    except RuntimeError:  # numba: no locator available
        made = njit(nogil=True, **options)(kernel)

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        if not made.signatures and not _kept(made, kernel):
            print(f"compiling {kernel.__module__}, once, in about ten seconds", file=sys.stderr)
        return made(*arguments)

    call.__dict__["dispatcher"] = made  # to look at its machine code
    return call


def _kept(made: Any, kernel: Callable[..., Any]) -> bool:
    folder = made.stats.cache_path
    module = kernel.__module__.rpartition(".")[2]
    return folder is not None and any(Path(folder).glob(f"{module}.{kernel.__name__}-*.nbi"))
