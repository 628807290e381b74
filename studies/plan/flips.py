"""Where the order of two steps flips within the stated uncertainty of constants.

Each constant alone goes to both ends of its interval, all others as they are. With D the time of a rival less that of
the best step, and D_0 that with no constant changed, a flip is where D, taken as straight between the two, is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.space import get_path
from dse.values import put
from dse.values.units import quantity_text
from simulators.steps.design import StepDesign
from simulators.steps.run.build import iteration

_ROUNDING = 1e-9  # of a step


@dataclass(frozen=True)
class Flip:
    """A value of a constant beyond which a rival is faster. share: how far off it is of the present value."""

    path: str
    value: float
    share: float

    def __str__(self) -> str:
        side = "below" if self.share < 0 else "above"
        return f"{self.path.removeprefix('system.')} {side} {quantity_text(self.value, self.path)}"


@dataclass(frozen=True)
class Uncertain:
    """A step whose machine's constants are uncertain. half_widths: path -> share of it by which it may be off."""

    best: StepDesign
    half_widths: Mapping[str, float]

    @cached_property
    def nominal(self) -> dict[str, float]:
        """The constants that the machine has."""
        values = {path: get_path(self.best, path) for path in self.half_widths if path.startswith("system.")}
        # a constant of 0 has no interval
        return {path: float(value) for path, value in values.items() if isinstance(value, int | float) and value}

    @cached_property
    def _system(self) -> Any:
        """The machine as it is, and with each constant at either end of its interval: arrays [1 + 2 constants]."""
        design, size = self.best, 1 + 2 * len(self.nominal)
        for place, (path, value) in enumerate(self.nominal.items()):
            factors = np.ones(size)  # place 0: the machine as it is
            factors[[1 + 2 * place, 2 + 2 * place]] = 1 - self.half_widths[path], 1 + self.half_widths[path]
            design = put(design, path, value * factors)
        return design.system

    def _seconds(self, design: StepDesign) -> NDArray[np.float64]:
        # all ends in one call
        return np.asarray(iteration(design.model_copy(update={"system": self._system})).seconds, float)

    @cached_property
    def _best_s(self) -> NDArray[np.float64]:
        return self._seconds(self.best)

    def flips(self, rival: StepDesign) -> list[Flip]:
        """Where a rival becomes the faster one, the nearest first."""
        return sorted(self._flips(rival), key=lambda flip: abs(flip.share))

    def _flips(self, rival: StepDesign) -> Iterator[Flip]:
        # a step may depend on none of the constants
        later = np.broadcast_to(self._seconds(rival) - self._best_s, (1 + 2 * len(self.nominal),))
        now = max(0.0, float(later[0]))  # a tie within rounding
        for place, (path, value) in enumerate(self.nominal.items()):
            for end, sign in ((1 + 2 * place, -1), (2 + 2 * place, 1)):
                # the rival is faster there by more than rounding
                if later[end] < -_ROUNDING * float(self._best_s.flat[0]):
                    # where the straight line from D_0 to D crosses 0
                    share = sign * self.half_widths[path] * now / (now - float(later[end]))
                    # a tie flips at once, on this side
                    yield Flip(path, value * (1 + share), share or sign * _ROUNDING)
