"""A question, answered by the command line in a process of its own: its lines, its run, its page, and progress."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from dse_mcp.questions import command_text

Report = Callable[[float, float | None, str], Awaitable[None]]
"""Called with what is done, of how much (None: not known), and a text."""
_PROGRESS = re.compile(r"(?P<text>[^━]*)━+\s+(?P<done>\d+)/(?P<of>\d+|\?)")
_WRITTEN = re.compile(r"^written to (\S+)", re.MULTILINE)
_FIRST_LINES = 12
_MOST_TEXT = 200_000
_ENDS_S = 10.0


class Answer(BaseModel):
    """What a command answered.

    answer: its first lines. text: all of them. command: that gives the same. run: folder of the run, relative to that
    of the server; page: its report; None where a command writes none. exit_code: as of the command line: 0, or 3 where
    no point was evaluated. refused: sentences of a refusal.
    """

    answer: list[str]
    text: str
    command: str
    run: str | None
    page: str | None
    exit_code: int
    refused: str | None = None


async def ask(words: Sequence[str], root: Path, report: Report) -> Answer:
    """Run a command in a folder, and return its answer.

    Where it is cancelled, the command is interrupted, and keeps what it has: the same question takes it up again.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "dse", *words),
        cwd=root,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        out, errors = await asyncio.gather(process.stdout.read(), followed(process.stderr, report))
        code = await process.wait()
    except BaseException:
        await _interrupt(process)
        raise
    text = out.decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    run = _run_of(text, root)
    if len(text) > _MOST_TEXT:
        text = f"{text[:_MOST_TEXT]}\n(cut after {_MOST_TEXT:,} of {len(text):,} characters; the page has all)\n"
    page = None if run is None or not (root / run / "report.html").is_file() else f"{run}/report.html"
    refused = errors.strip()[-_MOST_TEXT:] if code else None
    return Answer(
        answer=lines[:_FIRST_LINES],
        text=text,
        command=command_text(words),
        run=run,
        page=page,
        exit_code=code,
        refused=refused,
    )


async def followed(errors: asyncio.StreamReader, report: Report) -> str:
    """Text of standard error without progress, which is reported."""
    sentences, decoder, rest = list[str](), codecs.getincrementaldecoder("utf-8")("replace"), ""
    while True:
        block = await errors.read(1 << 16)
        # a block may end within a line, and within a character
        *lines, rest = re.split(r"[\r\n]", rest + decoder.decode(block, final=not block))
        for line in lines if block else [*lines, rest]:
            if (match := _PROGRESS.match(line)) is not None:
                total = None if match["of"] == "?" else float(match["of"])
                await report(float(match["done"]), total, match["text"].strip())
            elif line.strip():
                sentences.append(line)
        if not block:
            return "\n".join(sentences)


def _run_of(text: str, root: Path) -> str | None:
    """Folder of the run that a command wrote, relative to that of the server; None for none."""
    match = _WRITTEN.search(text)
    if match is None:
        return None
    place = (root / match[1]).resolve()
    return str(place.relative_to(root.resolve())) if place.is_relative_to(root.resolve()) else None


async def _interrupt(process: asyncio.subprocess.Process) -> None:
    """End a command as a terminal does, so that it keeps what it has; kill it where it does not end."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _ENDS_S)
            return
