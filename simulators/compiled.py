"""Compiling kernels with numba: cached on disk, without the interpreter lock, with a place for the cache."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel compiled on first use, which says so where no machine code is kept yet.

    Not `fastmath`: bits are the same on every machine. The code is kept beside the module, or in the user's own cache
    folder where that is read-only (never in a shared folder: a cache is code that is run), or nowhere.
    """
    if not os.access(Path(__file__).parent, os.W_OK):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "dse" / "numba"))
    from numba import njit

    try:
        made = njit(cache=True, nogil=True)(kernel)
    except RuntimeError:  # numba: no locator available
        made = njit(nogil=True)(kernel)

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
