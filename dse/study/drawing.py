"""Figures drawn by processes beside a study, so that nothing waits for them but the end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dse.evaluation.workers import Pool
from dse.plots import Draw, save, warm
from dse.progress import bar
from dse.study.settings import Figures

_MOST_WORKERS = 4  # a study has a dozen figures, and each worker imports matplotlib


@dataclass(frozen=True)
class _Figure:
    """A figure to draw into a file for each format."""

    name: str
    make: Draw
    folder: Path
    formats: tuple[str, ...]
    width: str

    def draw(self) -> None:
        save(self.make, self.folder, self.name, formats=self.formats, width=self.width)


def _serve(figure: _Figure | None) -> None:
    """Draw a figure in a worker; None only imports what drawing needs, while the study goes on."""
    if figure is None:
        warm()
    else:
        figure.draw()


@dataclass
class Drawing:
    """Workers that draw the figures that a study asks for: all, the first of a study (`key`), or none.

    A context manager: at its end the workers are ended, and what they did not finish is not drawn.
    """

    wanted: Figures
    _drawn: list[tuple[_Figure, Future[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._pool = Pool(_serve, None, size=size)
        self._threads = ThreadPoolExecutor(size)

    def __enter__(self) -> Drawing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. Does nothing the second time."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    def begin(self, figures: Iterable[tuple[str, Draw]], folder: Path, *, key: bool = False) -> None:
        """Begin to draw figures into a folder. key: the first of them answers the study's question.

        All are asked for, whether or not they are drawn: a study may write files between them.
        """
        for place, (name, make) in enumerate(figures):
            if self.wanted.name == "none" or (self.wanted.name == "key" and not (key and place == 0)):
                continue
            figure = _Figure(name, make, folder, self.wanted.format, self.wanted.width)
            self._drawn.append((figure, self._threads.submit(self._pool.call, figure)))

    def finish(self, study: str) -> int:
        """Wait until all are drawn, with a progress bar; their number. What a figure raises is raised."""
        if self._drawn:
            with bar(f"{study}: figures", len(self._drawn), unit="figures") as advance:
                for figure, future in self._drawn:
                    try:
                        future.result()
                    except Exception:  # it could not be sent, its worker was lost, or it fails here, too
                        figure.draw()
                    advance(1)
        return len(self._drawn)
