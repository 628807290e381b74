"""The memory system of one GPU, driven by traces of addresses."""

from collections.abc import Sequence

from simulators.memory.backend import MemoryBackend

BACKEND = MemoryBackend


def _trace(words: Sequence[str]) -> int:
    """`trace data=<file> [...]`, imported when it is asked for: the engine's compiler takes a while."""
    from simulators.memory.statistics import trace

    return trace(words)


COMMANDS = {"trace": _trace}
