"""Figures drawn by processes beside a study, so that nothing waits for them but the end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dse.errors.terminal import bar
from dse.evaluation.workers import Pool, num_cpus
from dse.plots import Draw, save, warm
from dse.study.settings import Figures

_MOST_WORKERS = 4  # a study has a dozen figures, and each worker imports matplotlib
_NICENESS = 5  # so that drawing does not slow down the evaluation; above that of tracking


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
        os.nice(_NICENESS)
        warm()
    else:
        figure.draw()


@dataclass
class FigureWorkers:
    """Workers that draw the figures that a study asks for: all, the first of a study (`key`), or none.

    Close it when done: what the workers did not finish is not drawn.
    """

    wanted: Figures
    _drawn: list[tuple[_Figure, Future[Any] | None]] = field(default_factory=list)

    def begin(self, figures: Iterable[tuple[str, Draw]], folder: Path, *, key: bool = False) -> None:
        """Begin to draw figures into a folder. key: the first of them answers the study's question.

        All are asked for, whether or not they are drawn: a study may write files between them.
        """
        for place, (name, make) in enumerate(figures):
            if self.wanted.name == "none" or (self.wanted.name == "key" and not (key and place == 0)):
                continue
            figure = _Figure(name, make, folder, self.wanted.format, self.wanted.width)
            self._drawn.append((figure, self._begin(figure)))

    def _begin(self, figure: _Figure) -> Future[Any] | None:
        """Give a figure to a worker; None where this machine has no room for one."""
        with suppress(OSError):
            return self._threads.submit(self._pool.call, figure)
        return None

    @cached_property
    def _pool(self) -> Pool:
        return Pool(_serve, None, size=min(_MOST_WORKERS, num_cpus()))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(_MOST_WORKERS, num_cpus()))  # a thread waits for each worker

    def finish(self, study: str) -> int:
        """Wait until all are drawn, with a progress bar; their number. What a figure raises is raised."""
        if self._drawn:
            with bar(f"{study}: figures", len(self._drawn), unit="figures") as advance:
                for figure, future in self._drawn:
                    if future is None or future.exception() is not None:  # also waits
                        figure.draw()  # it was not sent, its worker was lost, or it fails here, too, with its traceback
                    advance(1)
        return len(self._drawn)

    def close(self) -> None:
        """End the workers. Does nothing the second time."""
        if self._drawn:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if "_pool" in vars(self):  # of cached properties only those that were used
            self._pool.close()
