"""Compilation of the kernels of this package: CUDA C by clang, Triton's kernels by Triton, to PTX.

`python -m dse_ptx.build` writes kernels/ptx.zip. It is committed, so that nobody needs a compiler to run the kernels;
the first line of each text names the compiler.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dse_ptx.kernels import FOLDER, pack_texts

# PTX 6.0 has the `.sync` forms of `shfl` and `vote`, without which sm_70 has none
_CLANG = (
    # no header or library of CUDA is needed: the sources declare what they use themselves
    "-O2 -x cuda --cuda-device-only --cuda-gpu-arch=sm_70 -Xclang -target-feature -Xclang +ptx60 -nocudainc -nocudalib"
)


def clang_version() -> str:
    """Version of clang, or "" where it is absent."""
    program = shutil.which("clang")
    if program is None:
        return ""
    text = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return text.splitlines()[0]


def from_cuda(source: Path) -> str:
    """PTX of a file of CUDA C. Raises subprocess.CalledProcessError where it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.ptx"
        words = ["clang", *_CLANG.split(), "-Wno-unknown-cuda-version", "-S", str(source), "-o", str(target)]
        subprocess.run(words, check=True)
        return _plain(target.read_text("utf-8"), f"{source.name} by {clang_version()}")


def from_triton() -> Iterator[tuple[str, str]]:
    """(name, PTX) of the kernels of `dse_ptx.kernels.tutorials`, for sm_80."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dse_ptx.kernels import tutorials

    variants: Mapping[str, Any] = tutorials.VARIANTS
    for name, (function, types, constants) in variants.items():
        source = ASTSource(function, types | dict.fromkeys(constants, "constexpr"), constants)
        # compute capability 8.0, warps of 32 lanes
        compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": tutorials.WARPS})
        yield name, _plain(compiled.asm["ptx"], f"tutorials.py by Triton {triton.__version__}")


def _plain(text: str, origin: str) -> str:
    """The text without what debuggers read, after a line that names its source."""
    # sections of debugging hold paths of the machine that compiled, so that texts would differ from one to another
    text = re.sub(r"\n\t\.section\s+\.debug_.*?\n\t\}", "", text, flags=re.S)
    lines = [line.partition("//")[0].rstrip() for line in text.splitlines()]
    # `$L__tmp` labels mark lines for debuggers, and no branch goes to them
    remaining = [line for line in lines if line.strip() and not re.match(r"\s*(\.loc\b|\.file\b|\$L__tmp\d+:)", line)]
    return "\n".join([f"// {origin}", *remaining, ""])


def main() -> int:
    """Compile all."""
    pack_texts({source.stem: from_cuda(source) for source in FOLDER.glob("*.cu")} | dict(from_triton()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
