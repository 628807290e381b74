"""Install this clone into the environment that runs this: `make setup` does, with `dev`; it needs Python and pip alone.

`python -m benchmarks.install dev` installs the core, all plug-ins and an extra, in the versions of `constraints.txt`;
`everything` is all extras that need no torch. uv installs, from a folder of its own that is removed again, and reads
the package index that pip is configured for; where uv cannot be had, or fails, pip installs. Nothing is compiled ahead,
and what only developers of the libraries need, their tests and sources in C, is removed.

`python -m benchmarks.install --size` lists what weighs how much.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_SPACED = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "constraint": "UV_CONSTRAINT",
           "cert": "SSL_CERT_FILE", "trusted-host": "UV_INSECURE_HOST", "timeout": "UV_HTTP_TIMEOUT",
           "default-timeout": "UV_HTTP_TIMEOUT", "no-index": "UV_NO_INDEX"}  # fmt: skip
"""Settings of pip -> variables of uv that hold the same, where several are parted by spaces."""
_MAKERS = ("pip", "setuptools")
_SOURCES = (".c", ".cpp", ".h", ".hpp", ".pxd", ".pxi", ".pyx")


def projects() -> dict[str, Mapping[str, Sequence[str]]]:
    """Folder of a project -> its extras, each with its requirements; the core comes first, as `.`."""
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    return {
        str(file.parent.relative_to(ROOT)): tomllib.loads(file.read_text("utf-8"))["project"].get(
            "optional-dependencies", {}
        )
        for file in files
    }


def everything() -> list[str]:
    """Names of all extras but those that need torch, whose builds are for one machine or another, and uv's."""
    extras = {name: needed for of_project in projects().values() for name, needed in of_project.items()}
    return sorted(
        name for name, needed in extras.items() if not any(text.startswith(("torch", "uv>")) for text in needed)
    )


def requirements(extras: Sequence[str]) -> list[str]:
    """Words for pip: every project of this clone, in place, with those of the extras that it has."""
    known = projects()
    names = {name for of_project in known.values() for name in of_project}
    if unknown := sorted(set(extras) - names):
        way = f"choose from everything, {', '.join(sorted(names))}"
        raise SystemExit(f"install: no project has an extra {', '.join(unknown)}: {way}")
    words = []
    for folder, of_project in known.items():
        chosen = ",".join(name for name in extras if name in of_project)
        words += ["-e", f"./{folder}" + (f"[{chosen}]" if chosen else "")]
    return words


def variables(configuration: str) -> dict[str, str]:
    """Variables of uv that say what a configuration of pip says. configuration: as `pip config list` prints it.

    >>> variables("global.find-links='/a /b'")
    {'UV_FIND_LINKS': '/a,/b'}
    """
    found: dict[str, str] = {}
    for line in configuration.splitlines():
        name, _, value = line.partition("=")
        key, words = name.rpartition(".")[2], value.strip("'\"").replace("\\n", " ").split()
        if key == "find-links":
            found["UV_FIND_LINKS"] = ",".join(words)
        elif key in _SPACED:
            found[_SPACED[key]] = " ".join(words)
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # all indexes are one, as for pip
    return found


def _run(command: Sequence[str], extra: Mapping[str, str] | None = None) -> bool:
    return subprocess.run(command, cwd=ROOT, env={**(extra or {}), **os.environ}, check=False).returncode == 0


def _with_uv(words: Sequence[str]) -> bool:
    """Whether uv could be had, and installed it all."""
    text = next((line for line in CONSTRAINTS.read_text("utf-8").splitlines() if line.startswith("uv==")), "uv")
    with tempfile.TemporaryDirectory(prefix="dse-uv-") as folder:
        get = [*_PIP, "install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", folder]
        if not _run([*get, text]):
            return False
        said = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
        uv = str(Path(folder) / "bin" / "uv")
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--constraints", str(CONSTRAINTS)]
        return _run([*command, *words], variables(said))


def _with_pip(words: Sequence[str]) -> bool:
    print("install: uv cannot be had here, or failed: pip installs, which takes minutes", file=sys.stderr)
    return _run([*_PIP, "install", "--quiet", "--no-compile", "-c", str(CONSTRAINTS), *words])


def unneeded() -> Iterator[Path]:
    """Tests and sources in C of the installed libraries that `constraints.txt` names; torch compiles with its own.

    Of what made the environment, bytecode as well: nothing that runs here imports it.
    """
    lines = CONSTRAINTS.read_text("utf-8").splitlines()
    pinned = {_canonical(name) for name, version, _ in (line.partition("==") for line in lines) if version}
    for library in metadata.distributions():
        name = _canonical(library.name)
        for file in library.files or ():
            if name in _MAKERS and file.suffix == ".pyc":
                yield Path(str(file.locate()))
            if name in pinned and ("tests" in file.parts or file.suffix in _SOURCES):
                yield Path(str(file.locate()))


def _canonical(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def prune() -> None:
    """Remove what no program that runs here reads; and folders that are empty then."""
    files = list(unneeded())
    for file in files:
        file.unlink(missing_ok=True)
    for folder in sorted({file.parent for file in files}, key=lambda folder: -len(folder.parts)):
        with suppress(OSError):  # others are in it
            folder.rmdir()


def weigh(folder: Path) -> list[tuple[str, float]]:
    """Name -> MB of what lies directly in a folder, the heaviest first; bytecode of all is one."""
    sizes: Counter[str] = Counter()
    for parent, _, files in os.walk(folder):
        place = Path(parent)
        top = place.relative_to(folder).parts[:1] or (".",)
        name = "(bytecode)" if place.name == "__pycache__" else top[0].removesuffix(".libs")
        sizes[name] += sum((place / file).lstat().st_blocks * 512 for file in files)
    return [(name, size / (1 << 20)) for name, size in sizes.most_common()]


def main(words: Sequence[str]) -> int:
    """Install with the extras that are named; the exit code."""
    libraries = Path(sysconfig.get_path("purelib"))
    if list(words) == ["--size"]:
        sizes = weigh(libraries)
        print(f"{sum(size for _, size in sizes):7.0f} MB {libraries}")
        print("\n".join(f"{size:7.0f} MB {name}" for name, size in sizes if size >= 5.0))
        return 0
    if sys.prefix == sys.base_prefix:
        raise SystemExit("install: this Python is of the system, not of an environment: make setup makes one")
    began, extras = time.monotonic(), everything() if list(words) == ["everything"] else list(words)
    wanted = requirements(extras)
    if not _with_uv(wanted) and not _with_pip(wanted):
        return 1
    prune()
    print(f"setup: installed in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
