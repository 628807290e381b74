"""Files of other profilers that hold no kernel of a GPU: what they are, and what their own tools do with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dse.errors import ConfigError, Problem
from dse_chakra.packed import DAMAGED, open_packed

_LOOKED_AT = 1 << 24  # unpacked bytes
_SOURCE = "and no kernel of it is read"


@dataclass(frozen=True)
class _Kind:
    """What a file is where one of the marks is in it, and the way out."""

    rule: str
    marks: Sequence[bytes]
    way_out: str


_KINDS = (
    _Kind(
        f"is a record of an Ascend NPU, {_SOURCE}",
        (
            rb"Ascend Hardware",
            rb"Communication\(HCCL\)",
            rb"\bhcom_\w+__",
            rb"\bAI_(?:CORE|VECTOR_CORE)\b",
            rb"Accelerator Core",
            rb"\bHCCL\b",
        ),
        "open it with MindStudio Insight, or with msprof-analyze",
    ),
    _Kind(
        f"is a record of NCCL's profiler plug-in, {_SOURCE}: it times calls of the host and its proxy",
        (
            rb'"cat": ?"(?:COLL|P2P|GROUP|COLL_API|P2P_API|GROUP_API|PROXY|NET)"',
            rb"inspector_output_format_version",
            rb'"coll_perf"',
        ),
        "open it in Perfetto, and record kernels of the same run: nsys profile, or torch.profiler",
    ),
    _Kind(
        "is an execution plan of MSCCL++, and no profile",
        (rb'"(?:threadblocks|scratch_chunks|output_?chunks)"',),
        "record a run that it is part of: nsys profile, or torch.profiler",
    ),
    _Kind(
        f"is a record of a Gaudi accelerator, {_SOURCE}",
        (rb"\bHabana\b", rb"\bGaudi\d?\b", rb"\bsynLaunch"),
        "open it in Perfetto, as the documentation of the Intel Gaudi profiler shows",
    ),
    _Kind(
        f"is a record of a TPU, {_SOURCE}",
        (rb"/device:TPU:\d",),
        "open it with XProf (the profile plug-in of TensorBoard)",
    ),
)


def foreign_problem(path: Path) -> Problem | None:
    """The problem of a file that could not be read, by what it is; None where nothing tells."""
    try:
        with open_packed(path) as (file, _):
            text = file.read(_LOOKED_AT)
    except (ConfigError, OSError, *DAMAGED):
        return None
    kind = next((kind for kind in _KINDS if any(re.search(mark, text) for mark in kind.marks)), None)
    return None if kind is None else Problem("profile", kind.rule, str(path), kind.way_out)
