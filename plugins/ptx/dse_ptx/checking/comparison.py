"""Launches by both interpreters, and whether their memory is the same afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_ptx import vm
from dse_ptx.arguments import Argument, Pointer, parameter_bytes
from dse_ptx.checking import random_programs
from dse_ptx.checking.reference import Reference
from dse_ptx.execution import LaunchOptions, Module, PtxDevice


def both(
    text: str | Path, name: str, size: tuple[Sequence[int], Sequence[int]], arguments: Sequence[Any], shared: int = 0
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Arrays among the arguments after a launch, by the compiled and by the plain interpreter. size: grid and block."""
    # addresses are the same in both: the plain interpreter works on a copy of the device
    device = PtxDevice()
    module = Module(text, device)
    passed = _on_device(device, arguments)
    # copied before the launch, which changes the device in place
    memory = bytearray(device.content().tobytes())
    module.launch(name, *size, passed, LaunchOptions(shared=shared))
    function = module.function(name)
    grid, block = ((*entry, 1, 1)[:3] for entry in size)
    parameters = parameter_bytes(function.parameters, passed).tobytes()
    addresses = module.addresses(name)
    Reference(function, memory, parameters, grid, block, addresses, module.kernel(name).shared_bytes + shared).run()  # type: ignore[arg-type]
    pairs = []
    for argument, pointer in zip(arguments, passed, strict=True):
        if isinstance(pointer, Pointer):
            start = pointer.address - vm.GLOBAL_BASE
            plain = np.frombuffer(bytes(memory[start : start + argument.nbytes]), argument.dtype).reshape(
                argument.shape
            )
            pairs.append((device.read(pointer, argument.dtype, argument.shape), plain))
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _on_device(device: PtxDevice, arguments: Sequence[Any]) -> list[Argument]:
    is_array = [isinstance(entry, np.ndarray) and entry.ndim > 0 for entry in arguments]
    return [device.allocate(entry) if yes else entry for entry, yes in zip(arguments, is_array, strict=True)]


def same(compiled: Sequence[NDArray[Any]], plain: Sequence[NDArray[Any]]) -> bool:
    """Return whether arrays are equal to the bit."""
    # bytes, as numbers that are none do not equal themselves
    return all(a.tobytes() == b.tobytes() for a, b in zip(compiled, plain, strict=True))


def random_is_equal(seed: int, templates: Sequence[str] = random_programs.TEMPLATES, depth: int = 2) -> bool:
    """Return whether both interpreters execute a random program alike."""
    text, words = random_programs.kernel(seed, templates, depth), random_programs.data(seed)
    size = ((random_programs.BLOCKS,), (random_programs.THREADS,))
    return same(*both(text, "random", size, [words, 1.25]))
