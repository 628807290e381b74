"""Kernels in CUDA C and Triton, and their PTX, which compilers wrote: packed in `ptx.zip`, as nobody reads it.

`python -m zipfile -e plugins/ptx/dse_ptx/kernels/ptx.zip <folder>` unpacks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

FOLDER = Path(__file__).parent
_PACKED = FOLDER / "ptx.zip"


@cache
def kernel_text(name: str) -> str:
    """The PTX of a file of kernels, such as `sgemm`. Raises KeyError where there is none."""
    with ZipFile(_PACKED) as packed:
        return packed.read(f"{name}.ptx").decode()


def pack_texts(texts: Mapping[str, str], target: Path = _PACKED) -> None:
    """Write the PTX of all files by name; the same texts are the same bytes, as no time is written."""
    with ZipFile(target, "w", ZIP_DEFLATED, compresslevel=9) as packed:
        for name, text in sorted(texts.items()):
            # a ZipInfo without a date has that of 1980
            packed.writestr(ZipInfo(f"{name}.ptx"), text, ZIP_DEFLATED, 9)
