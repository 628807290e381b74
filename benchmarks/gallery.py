"""The gallery of the documentation: every study with its question, its answer, its key figure and its command.

`python -m benchmarks.gallery --record [<study> ...]` runs the studies (some ten minutes for all), and keeps their
pictures and words in `docs/gallery/`; the site makes a page of these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recorded import ROOT
from dse.config.options import list_options

FOLDER = ROOT / "docs" / "gallery"
MOST_BYTES = 100_000  # of a picture
_WIDTHS = (1200, 1000, 850, 700)  # pixels, tried until the picture is small enough
_COLOURS = 64


def run(study: str, folder: Path, words: Sequence[str] = ()) -> Path:
    """Run a study with its key figure; the folder of the run. Raises RuntimeError where it fails."""
    command = [sys.executable, "-m", "dse", f"study={study}", "figures=key", "tracking=none", f"output_dir={folder}"]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"study={study}: {done.stderr.strip()[-500:]}")
    return folder / study / "latest"


def keep(study: str, finished: Path) -> None:
    """Keep the words of a finished run, and its picture where it has one."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    summary = json.loads((finished / "summary.json").read_text("utf-8"))
    pictures = sorted((finished / "figures").glob("*.png")) if (finished / "figures").is_dir() else []
    words = {"answer": summary.get("answer", ""), "figure": pictures[0].stem if pictures else ""}
    (FOLDER / f"{study}.json").write_text(json.dumps(words, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if pictures:
        shrink(pictures[0], FOLDER / f"{study}.png")


def shrink(picture: Path, target: Path) -> None:
    """Write a picture with few colours, as wide as `MOST_BYTES` allows. Raises ValueError where it is too large."""
    from PIL import Image

    with Image.open(picture) as image:
        full = image.convert("RGB")
    for width in _WIDTHS:
        size = (min(width, full.width), round(full.height * min(width, full.width) / full.width))
        small = full.resize(size, Image.Resampling.LANCZOS).quantize(_COLOURS, dither=Image.Dither.NONE)
        small.save(target, optimize=True)
        if target.stat().st_size <= MOST_BYTES:
            return
    raise ValueError(f"{picture} is larger than {MOST_BYTES} bytes at {_WIDTHS[-1]} pixels")


def page() -> str:
    """Page of the gallery."""
    head = "# Gallery\n\nEvery shipped study: its question, its answer on the default machine, its key figure and its "
    head += "command. [Choose your question](start/questions.md) sorts them by subject.\n"
    return "\n".join([head, *(line for study in list_options("study") for line in _entry(study))])


def _entry(study: str) -> Iterator[str]:
    """Lines of a study."""
    yield f"## {study}\n"
    yield f"**{list_options('study')[study]}**\n"
    words = _words(study)
    if words.get("answer"):
        yield f"{str(words['answer'])[:1].upper()}{str(words['answer'])[1:]}.\n"
    if (FOLDER / f"{study}.png").exists():
        yield f"![{study}: {str(words['figure']).replace('_', ' ')}](gallery/{study}.png)\n"
    yield f"```sh\npython -m dse study={study}\n```\n"


def _words(study: str) -> Mapping[str, Any]:
    with contextlib.suppress(FileNotFoundError):
        words: Mapping[str, Any] = json.loads((FOLDER / f"{study}.json").read_text("utf-8"))
        return words
    return {}


def main() -> int:
    """Run studies, and keep what the gallery shows of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gallery", description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", help="studies to run; all by default")
    parser.add_argument("--record", action="store_true", help="run them and keep pictures and words")
    words = parser.parse_args()
    if not words.record:
        print(page())
        return 0
    for study in words.studies or list_options("study"):
        with tempfile.TemporaryDirectory() as folder:
            keep(study, run(study, Path(folder)))
        print(study, file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
