"""Vega in a process of its own. Its engine reserves gigabytes of addresses, and aborts where that is not allowed
(`ulimit -v`): a study must survive that. Run as a script, this module answers one request: `bundle`, or `png` of the
Vega-Lite specification that it is given.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PATIENCE_S = 120.0
_SCALE = 1.5  # pixels of a picture for each of the specification


@functools.cache
def begin() -> Future[bytes]:
    """Begin to read or make the library, once, while the caller does what comes before."""
    # no `with`: it would wait for the end
    thread = ThreadPoolExecutor(1)
    library = thread.submit(_bundle)
    thread.shutdown(wait=False)
    return library


def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script. "" where the engine cannot run, or is not installed."""
    return begin().result().decode("utf-8")


def absence() -> str:
    """Why pages have no interactive charts here, with the way out, or ""."""
    if library():
        return ""
    why = "their engine may not reserve the addresses that it needs (ulimit -v)"
    if not _version():
        why = "vl-convert-python is not installed (pip install 'overlap-dse-pages[charts]')"
    return f"The interactive charts are left out: {why}."


def _version() -> str:
    """The version of the engine; "" where it is not installed."""
    try:
        return version("vl-convert-python")
    except PackageNotFoundError:
        return ""


def png(specification: str) -> bytes:
    """Picture of a Vega-Lite specification; b"" where the engine cannot run."""
    return _ask("png", specification)


def _bundle() -> bytes:
    """The library, which takes more than a second to make, from the user's cache (never a shared folder: it is run)."""
    from dse.files import atomic_replacement  # not by the script, which needs none of it

    if not _version():
        return b""
    # the version is in the name: a new engine makes a new file
    kept = Path.home() / ".cache" / "dse" / f"vega-{_version()}.js"
    with suppress(OSError):
        return kept.read_bytes()
    if bundle := _ask("bundle", ""):
        with suppress(OSError):  # a home that cannot be written: made anew each time
            kept.parent.mkdir(parents=True, exist_ok=True)
            with atomic_replacement(kept) as fresh:
                fresh.write_bytes(bundle)
    return bundle


def _ask(request: str, text: str) -> bytes:
    # -P: the script's folder, which holds modules such as `tables`, is not put on the path
    command = [sys.executable, "-P", str(Path(__file__)), request]
    try:
        done = subprocess.run(command, input=text.encode("utf-8"), capture_output=True, timeout=_PATIENCE_S, check=True)
    # an abort of the engine (a negative exit code) as well as a missing interpreter or a timeout
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout


def _answer(request: str) -> bytes:
    import vl_convert

    if request == "bundle":
        bundle: str = vl_convert.javascript_bundle()
        return bundle.encode("utf-8")
    return bytes(vl_convert.vegalite_to_png(sys.stdin.read(), scale=_SCALE))


if __name__ == "__main__":
    # texts of a study hold Greek letters and signs; the locale of a container is often ASCII
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.buffer.write(_answer(sys.argv[1]))
