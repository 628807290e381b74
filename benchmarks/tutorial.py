"""Pages whose commands are run: every command of a `console` block, in order, in a fresh folder.

`python -m benchmarks.tutorial [--record] [<page> ...]` runs the commands of the pages and compares what they print with
what the page shows; `--record` writes it into the page instead. A block with a title is a file, which is written first:

    ```csv title="my.csv"
    ```console
    $ python -m dse study=ficco_sweep
    expected output, in which a line `...` stands for any lines
    ```

A comment `<!-- lines: 1-8, 12 -->` before a block says which lines of the output are recorded; others become `...`.
Times, dates, hashes of commits and folders are not compared.
"""

from __future__ import annotations

import argparse
import difflib
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/start/tutorial.md")
COLUMNS = 100
"""Width of the terminal."""
_FENCE = re.compile(
    r"(?:<!-- lines: (?P<lines>[^>]*) -->\n)?```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_CHANGING = (
    (r"\d{4}-\d{2}-\d{2}[_ ]\d{2}[-:]\d{2}[-:]\d{2}(_\d+)?", "<time>"),
    (r"\b\d+(\.\d+)? (s|ms|min|points/s)\b(?= (left|for|in)|$)", "<duration>"),
    (r"(?<=git )[0-9a-f]{7,40}\S*", "<commit>"),
    (r"Python [\d.]+( with changes)? on .*", "<machine>"),
    (r"(/[\w.+-]+)+/(?=outputs|mlflow)", "<folder>/"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. start, end: where its body stands in the text. lines: which of its output is shown."""

    kind: str
    title: str
    body: str
    lines: str
    start: int
    end: int


def blocks(text: str) -> list[Block]:
    """Blocks of a page that are run or written."""
    found = [
        Block(match["kind"], match["title"] or "", match["body"], match["lines"] or "", *match.span("body"))
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if block.title or block.kind == "console"]


def commands(body: str) -> Iterator[tuple[str, str]]:
    """Yield (command, expected output) of a console block; a command goes on in the next line after `\\`."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n?", part)
        assert command is not None
        yield command[0].rstrip("\n"), part[command.end() :]


def run(command: str, folder: Path) -> str:
    """Run a command in a terminal of `COLUMNS` columns; what it prints, or, of one that prints nothing, its errors.

    Raises RuntimeError where it fails and prints a traceback, or cannot be found.
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    child = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    parts = list[bytes]()
    while part := _read(ours):
        parts.append(part)
    os.close(ours)
    _, errors = child.communicate()
    if child.returncode == 127 or "Traceback" in errors:
        raise RuntimeError(f"{command}: {errors[-1000:]}")
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode().replace("\r\n", "\n"))
    return "\n".join(line.rstrip() for line in (printed or errors).rstrip().split("\n"))


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:  # the other end of the terminal is closed
        return b""


def select(output: str, lines: str) -> str:
    """Lines of an output, as `1-8, 12` or `-1` (the last) names them; `...` for what is left out."""
    if not lines:
        return output
    rows = output.split("\n")
    wanted = set[int]()
    for part in lines.split(","):
        first, last = re.fullmatch(r"\s*(-?\d+)(?:-(\d+))?\s*", part).groups()  # type: ignore[union-attr]
        place = int(first) if int(first) > 0 else len(rows) + 1 + int(first)
        wanted |= set(range(place, int(last or place) + 1))
    shown = list[str]()
    for number, row in enumerate(rows, start=1):
        if number in wanted:
            shown.append(row)
        elif not shown or shown[-1] != "...":
            shown.append("...")
    return "\n".join(shown)


def plain(text: str) -> list[str]:
    """Lines of an output without what differs from run to run, and without rules and padding of tables."""
    for pattern, name in _CHANGING:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return [re.sub(r"\s+", " ", line).strip() for line in text.strip().split("\n")]


def matches(expected: str, actual: str) -> bool:
    """Whether an output is as expected; a line `...` stands for any number of lines."""
    return _matches(plain(expected), plain(actual))


def _matches(wanted: Sequence[str], rows: Sequence[str]) -> bool:
    if not wanted:
        return not rows
    if wanted[0] == "...":
        return any(_matches(wanted[1:], rows[start:]) for start in range(len(rows) + 1))
    return bool(rows) and rows[0] == wanted[0] and _matches(wanted[1:], rows[1:])


def check(page: Path, *, record: bool) -> list[str]:
    """Run a page; what differs, and nothing where it is recorded."""
    text = page.read_text("utf-8")
    differences, written, done = list[str](), list[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks(text):
            if block.title:
                (Path(folder) / block.title).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / block.title).write_text(block.body, encoding="utf-8")
                continue
            outcomes = [(command, expected, run(command, Path(folder))) for command, expected in commands(block.body)]
            differences += [
                f"{page.name}: {command}\n"
                + "\n".join(difflib.unified_diff(plain(expected), plain(actual), lineterm=""))
                for command, expected, actual in outcomes
                if not matches(expected, actual)
            ]
            body = "".join(_entry(command, select(actual, block.lines)) for command, _, actual in outcomes)
            written += [text[done : block.start], body]
            done = block.end
    if record:
        page.write_text("".join([*written, text[done:]]), encoding="utf-8")
        return []
    return differences


def _entry(command: str, output: str) -> str:
    return f"$ {command}\n" + (f"{output}\n" if output else "")


def main() -> int:
    """Run the pages; 1 where an output is not as the page shows it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tutorial", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help="pages to run")
    parser.add_argument("--record", action="store_true", help="write what the commands print into the pages")
    words = parser.parse_args()
    differences = [text for page in words.pages for text in check(ROOT / page, record=words.record)]
    print("\n\n".join(differences) or f"{len(words.pages)} pages: every output as shown")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
