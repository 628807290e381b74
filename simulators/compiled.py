"""Compilation of kernels with numba: cached on disk, without the interpreter lock, with a writable cache folder.

Machine code is cached by the file of the kernel, so that the functions it calls must be in the same file.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dse.plugins import DoctorCheck


def check_cache(options: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Compile a small kernel for `dse doctor`, and look where its machine code is kept."""

    def double(number: float) -> float:
        return 2.0 * number

    dispatcher = _compile(double, {}).__dict__["dispatcher"]
    is_right = dispatcher(21.0) == double(21.0)
    folder = dispatcher.stats.cache_path
    if not is_right or folder is None:
        way = "make the folder of the package, or ~/.cache, writable"
        yield DoctorCheck("warn" if is_right else "fail", "numba", "compiles anew in every run", way)
    else:
        yield DoctorCheck("ok", "numba", f"compiles, and keeps machine code in {folder}")


def compile_lazily(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel on first use, with a notice if no machine code is cached yet."""
    return _compile(kernel, {})


def flat(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel that allocates no arrays, without reference counts of the arrays passed to its parts.

    The counts are atomic, and took four fifths of the time of an inner loop of `inline_always` parts.
    """
    return _compile(kernel, _FLAT)


def inline_always(part: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of a `flat` kernel in the same file to be inlined at every use: for inner loops."""
    from numba import njit

    compiled: Callable[..., Any] = njit(inline="always", **_FLAT)(part)
    return compiled


def inline_never(part: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of a `flat` kernel in the same file to be called: for rare cases."""
    from numba import njit

    compiled: Callable[..., Any] = njit(**_FLAT)(part)
    return compiled


_COMPILING = "DSE_COMPILING"  # modules whose compilation was told
_FLAT: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


def _compile(kernel: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile a kernel.

    Without `fastmath`, so that results have the same bits on every machine. The code is cached beside the module, or in
    the user's cache folder if that is read-only (never in a shared folder: cached code is executed), or not at all.
    """
    if not os.access(Path(__file__).parent, os.W_OK):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "dse" / "numba"))
    from numba import njit

    try:
        dispatcher = njit(cache=True, nogil=True, **options)(kernel)
    except RuntimeError:  # numba: no locator available
        dispatcher = njit(nogil=True, **options)(kernel)

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        if not dispatcher.signatures and not _has_machine_code(dispatcher, kernel):
            _tell_compilation(kernel.__module__)
        return dispatcher(*arguments)

    call.__dict__["dispatcher"] = dispatcher  # for inspection of its machine code

    return call


def _tell_compilation(module: str) -> None:
    """Tell that a module is compiled, once for all its kernels, in this process and in those that it starts."""
    modules = os.environ.get(_COMPILING, "").split()
    if module not in modules:
        os.environ[_COMPILING] = " ".join([*modules, module])
        print(f"compiling {module}, once, in about ten seconds", file=sys.stderr)


def is_compiled(kernel: Callable[..., Any]) -> bool:
    """Return whether a kernel of `compile_lazily` has machine code, here or on disk: a call does not compile it."""
    dispatcher = kernel.__dict__["dispatcher"]
    return bool(dispatcher.signatures) or _has_machine_code(dispatcher, dispatcher.py_func)


def _has_machine_code(dispatcher: Any, kernel: Callable[..., Any]) -> bool:
    folder = dispatcher.stats.cache_path
    module = kernel.__module__.rpartition(".")[2]
    return folder is not None and any(Path(folder).glob(f"{module}.{kernel.__name__}-*.nbi"))
