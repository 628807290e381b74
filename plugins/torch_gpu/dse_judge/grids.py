"""Launches of a GEMM by a library: the kernel and its grid, and how many SMs cuBLAS counts on."""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from dse_judge.timing import Call, Row


@contextmanager
def sm_target(sms: int) -> Iterator[None]:
    """Let cuBLAS choose kernels for a number of SMs, on every stream of this thread. Raises RuntimeError."""
    _set_target(sms)
    try:
        yield
    finally:
        _set_target(0)  # 0: all SMs


def _set_target(sms: int) -> None:
    status = _cublas().cublasSetSmCountTarget(ctypes.c_void_p(torch.cuda.current_blas_handle()), sms)
    if status:
        raise RuntimeError(f"cuBLAS status {status}: the number of SMs could not be set to {sms}")


@cache
def _cublas() -> ctypes.CDLL:
    """The cuBLAS that torch has loaded."""
    torch.cuda.current_blas_handle()
    # a second copy of the library would have handles of its own
    loaded = Path("/proc/self/maps").read_text("utf-8").split()
    return ctypes.CDLL(next(word for word in loaded if "/libcublas.so" in word))


def grid_of(call: Call) -> Row:
    """The longest kernel of a call: its name, its blocks, and how many of them an SM holds, by torch's profiler."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    # split-k adds small kernels that reduce
    longest = max(kernels, key=lambda event: float(event["dur"]))
    x, y, z = longest["args"]["grid"]
    cells = {"kernel": longest["name"], "kernels": len(kernels), "blocks": x * y * z}
    return {**cells, "blocks_per_sm": longest["args"].get("blocks per SM"), "threads": longest["args"]["block"][0]}
