"""A progress bar with rate and time left on the terminal's error stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

_QUIET: Final = ContextVar("quiet", default=False)


class Advance(Protocol):
    """Tells the bar that `count` more are done; `label` changes what it says.

    fewer: by how much there is less to do than was thought. exactly: how many were done in the end, all of them.
    """

    def __call__(self, count: int, label: str | None = None, *, fewer: int = 0, exactly: int | None = None) -> None: ...


@contextmanager
def quiet() -> Iterator[None]:
    """Show no bars meanwhile: those of a part would overwrite that of the work it belongs to."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


@contextmanager
def bar(label: str, total: int | None, unit: str = "points") -> Iterator[Advance]:
    """Show progress over `total` points, or other units (None: not known beforehand)."""
    if _QUIET.get():
        yield lambda count, label=None, *, fewer=0, exactly=None: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from dse.errors.terminal import Terminal

    speed = TextColumn("{task.fields[rate]}")
    left = TextColumn("left")
    columns = (
        TextColumn("{task.description}", markup=False),  # labels hold names that users chose
        BarColumn(),
        MofNCompleteColumn(),
        speed,
        TimeElapsedColumn(),
    )
    with Progress(*columns, TimeRemainingColumn(), left, console=Terminal(stderr=True)) as progress:
        task = progress.add_task(label, total=total, rate="")

        def advance(count: int, label: str | None = None, *, fewer: int = 0, exactly: int | None = None) -> None:
            progress.update(task, advance=count, description=label)
            shown = progress.tasks[0]
            if fewer and shown.total is not None:
                progress.update(task, total=shown.total - fewer)
            if exactly is not None:
                progress.update(task, total=exactly, completed=exactly)
            if shown.total is not None and shown.completed > shown.total:  # baselines outside the space
                progress.update(task, total=shown.completed)
            rate = shown.completed / shown.elapsed if shown.elapsed else 0.0
            progress.update(task, rate=f"{rate:,.{0 if rate >= 10 else 1}f} {unit}/s")

        yield advance
