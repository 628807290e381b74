"""Figures inside a page: each as SVG or as WebP of 256 colours, whichever is smaller."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from dse.errors import ConfigError
from dse.results import output_files

MOST_BYTES = 1_200_000
"""Bytes that all figures of a page take together; what is more is linked."""
# a PNG of a folder from elsewhere may decompress to gigabytes
_MOST_PIXELS = 40_000_000
_MOST_COLOURS = 256
_HARMLESS = "/:=(),;!?@&*+-._~' "  # characters that a data URI in quotes may hold as they are


@dataclass(frozen=True)
class Picture:
    """A figure. source: a data URI, "" where it is only linked. links: files beside the page, relative to it."""

    title: str
    source: str
    links: tuple[str, ...]


def pictures(folder: Path, base: Path, *, order: Sequence[str] = (), most: int = MOST_BYTES) -> list[Picture]:
    """Pictures of the figures in a folder, without timelines; links are relative to `base`.

    The smallest are inside until `most` bytes are reached. order: names of the first ones.
    """
    names = sorted({path.stem for kind in ("svg", "png") for path in folder.glob(f"*.{kind}")})
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    names = [name for name in names if not name.startswith("timeline_")]
    with ThreadPoolExecutor() as threads:  # coding pictures holds no lock
        named = dict(zip(names, threads.map(partial(_source, folder), names), strict=True))
    left, inside = most, set()
    for name in sorted(named, key=lambda name: len(named[name])):
        if len(named[name]) <= left:
            left -= len(named[name])
            inside.add(name)
    return [
        Picture(words(name), source if name in inside else "", links(folder, name, base=base))
        for name, source in named.items()
    ]


def links(folder: Path, name: str, *, base: Path) -> tuple[str, ...]:
    """Addresses of the files of a figure, relative to the folder of a page."""
    found_paths = [path for kind in ("pdf", "svg", "png", "json") if (path := folder / f"{name}.{kind}").is_file()]
    return tuple(quote(str(path.relative_to(base))) for path in found_paths)


def words(name: str) -> str:
    """A file's name as words: `Speedup`, `Fidelity analytic node`."""
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]


def data_uri(data: bytes, kind: str) -> str:
    """A `data:` address of bytes."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _source(folder: Path, name: str) -> str:
    """The shorter of the data URIs of a figure; "" where no file of it can be read."""
    sources = [source for make in (_svg, _webp) if (source := make(folder / name))]
    return min(sources, key=len, default="")


def _svg(path: Path) -> str:
    try:
        text = output_files.text(path.with_name(f"{path.name}.svg"))
    except (ConfigError, OSError):
        return ""
    # runs of whitespace mean nothing in an SVG; percent-encoded they would take three bytes each
    return "data:image/svg+xml," + quote(re.sub(r"\s+", " ", text), safe=_HARMLESS)


def _webp(path: Path) -> str:
    """The PNG, of 256 colours, without loss otherwise."""
    from PIL import Image

    try:
        with output_files.open_untrusted(path.with_name(f"{path.name}.png")) as file:
            image = Image.open(file, formats=["PNG"])
            if image.width * image.height > _MOST_PIXELS:
                return ""
            # dithering would add noise to flat areas, which then compress badly
            few = image.convert("RGB").quantize(_MOST_COLOURS, dither=Image.Dither.NONE).convert("RGB")
    except (ConfigError, OSError, ValueError, SyntaxError):  # a damaged file has no picture
        return ""
    packed = io.BytesIO()
    # for a lossless WebP `quality` is the effort of compression, not a loss
    few.save(packed, "WEBP", lossless=True, quality=50, method=4)
    return data_uri(packed.getvalue(), "image/webp")


def inside(shown: Iterable[Picture]) -> Sequence[Picture]:
    """Pictures that are in the page."""
    return [picture for picture in shown if picture.source]
