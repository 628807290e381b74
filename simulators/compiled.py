"""Compilation of kernels with numba: cached on disk, without the interpreter lock, with a writable cache folder.

Machine code is cached by the file of the kernel, so that the functions it calls must be in the same file. The first
call of a kernel imports numba, which takes longer than all that refuses a wrong value.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dse.plugins import DoctorCheck

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check_cache(options: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Compile a small kernel for `dse doctor`, and look where its machine code is kept."""

    def double(number: float) -> float:
        return 2.0 * number

    dispatcher = dispatcher_of(_compile(double, {}))
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


def compile_ahead(kernel: Callable[..., Any], *arrays: NDArray[Any]) -> None:
    """Begin to compile a kernel for arrays of these types in a process of its own, for which its first call waits.

    It begins once, and not where machine code is known or would not be kept, a worker asks, or there is a single core.
    """
    alone = len(os.sched_getaffinity(0)) < 2 or multiprocessing.parent_process() is not None
    if alone or _AHEAD in kernel.__dict__ or is_compiled(kernel) or dispatcher_of(kernel).stats.cache_path is None:
        return
    types = [f"{array.dtype.str} {array.ndim}" for array in arrays]
    command = [sys.executable, "-P", "-c", _COMPILE, kernel.__module__, kernel.__name__, *types]
    environment, quiet = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)  # the call here tells what fails
    atexit.register(process.kill)  # does nothing once it has ended
    kernel.__dict__[_AHEAD] = process


def compile_for(module: str, name: str, *types: str) -> None:
    """Compile a kernel for contiguous arrays, each by its dtype and dimensions (`<f8 2`), and keep the machine code."""
    import numpy as np
    from numba import typeof

    pairs = [text.split() for text in types]
    arrays = [np.empty((1,) * int(dimensions), dtype) for dtype, dimensions in pairs]
    dispatcher_of(getattr(importlib.import_module(module), name)).compile(tuple(map(typeof, arrays)))


def flat(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel that allocates no arrays, without reference counts of the arrays passed to its parts.

    The counts are atomic, and took four fifths of the time of an inner loop of `inline_always` parts.
    """
    return _compile(kernel, _FLAT)


def flat_over(*modules: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a `flat` kernel that calls parts of those in other modules, anew when one of their files changes.

    It names such a part by its module (`engine.serve_line`), as a part is compiled when the first kernel needs it.
    """
    return lambda kernel: _compile(kernel, {**_FLAT, _OVER: modules})


def inline_always(part: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of a `flat` kernel in the same file to be inlined at every use: for inner loops."""
    return _part(part, {"inline": "always"})


def inline_never(part: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of a `flat` kernel in the same file to be called: for rare cases."""
    return _part(part, {})


def _part(part: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The part as it is: it is compiled, and takes its own place in its module, with the first kernel there."""
    _PARTS.setdefault(part.__module__, {})[part.__name__] = options
    return part


_PARTS: dict[str, dict[str, dict[str, Any]]] = {}  # module -> part that is not compiled yet -> options
_LOCK = threading.Lock()  # several threads may be the first to call a kernel
_COMPILING = "DSE_COMPILING"  # modules whose compilation was told
_AHEAD = "ahead"  # the process that compiles a kernel, among its attributes
_COMPILE = "import gc, sys; gc.disable(); import simulators.compiled as it; it.compile_for(*sys.argv[1:])"
_FLAT: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
_OVER = "over"  # modules whose parts a kernel calls, among its options


def _compile(kernel: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile a kernel on its first call."""

    @functools.cache
    def dispatcher() -> Any:
        return _dispatcher(kernel, options)

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        compiled = dispatcher_of(call)
        if not compiled.signatures and not _has_machine_code(compiled, kernel):
            _tell_compilation(kernel.__module__)
            if process := call.__dict__.get(_AHEAD):
                process.wait()
        return compiled(*arguments)

    call.__dict__["dispatcher"] = dispatcher
    return call


def _dispatcher(kernel: Callable[..., Any], options: dict[str, Any]) -> Any:
    """The dispatcher of numba for a kernel, whose parts are compiled with it.

    Without `fastmath`, so that results have the same bits on every machine. The code is cached beside the module, or in
    the user's cache folder if that is read-only (never in a shared folder: cached code is executed), or not at all.
    """
    if not os.access(Path(__file__).parent, os.W_OK):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "dse" / "numba"))
    from numba import njit

    options, modules = {name: value for name, value in options.items() if name != _OVER}, options.get(_OVER, ())
    for names in (*(vars(module) for module in modules), kernel.__globals__):  # numba looks there for what is called
        for name, chosen in _PARTS.pop(names["__name__"], {}).items():
            names[name] = njit(**_FLAT, **chosen)(names[name])
    try:
        compiled = njit(cache=True, nogil=True, **options)(kernel)
    except RuntimeError:  # numba: no locator available
        return njit(nogil=True, **options)(kernel)
    index = compiled._cache._cache_file
    if modules:  # numba compares the stamp of the kernel's own file alone
        files = [Path(str(module.__file__)) for module in modules]
        index._source_stamp = (index._source_stamp, *(file.stat().st_mtime_ns for file in files))
    try:
        index.load(None)
    except Exception:  # an index that names a module that has moved, or that was cut, raises anything
        index.flush()
    return compiled


def dispatcher_of(kernel: Callable[..., Any]) -> Any:
    """The dispatcher of a kernel of `compile_lazily` or `flat`, for inspection of its machine code."""
    with _LOCK:
        return kernel.__dict__["dispatcher"]()


def _tell_compilation(module: str) -> None:
    """Tell that a module is compiled, once for all its kernels, in this process and in those that it starts."""
    modules = os.environ.get(_COMPILING, "").split()
    if module not in modules:
        os.environ[_COMPILING] = " ".join([*modules, module])
        print(f"compiling {module}, once, in about ten seconds", file=sys.stderr)


def is_compiled(kernel: Callable[..., Any]) -> bool:
    """Return whether a kernel of `compile_lazily` has machine code, here or on disk: a call does not compile it."""
    compiled = dispatcher_of(kernel)
    return bool(compiled.signatures) or _has_machine_code(compiled, compiled.py_func)


def _has_machine_code(dispatcher: Any, kernel: Callable[..., Any]) -> bool:
    folder = dispatcher.stats.cache_path
    module = kernel.__module__.rpartition(".")[2]
    return folder is not None and any(Path(folder).glob(f"{module}.{kernel.__name__}-*.nbi"))
