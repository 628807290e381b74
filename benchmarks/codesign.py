"""Co-design held against what is published: `python -m benchmarks.codesign [<group> ...] [--json] [--fit]`.

technology: area and power of eight public GPUs by the rules of `dse_codesign.technology`, none of which knows a chip;
the same with each GPU left out of the fit of the four calibrated coefficients; and GPUs that are in no fit (held out).
`--fit` prints these coefficients anew: they make the largest relative error least, which is a linear programme, as
areas and powers are linear in them. inner, outer, claims: see `validation.codesign_search` (minutes).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from dse_codesign.technology import (
    Coefficients,
    MachineKnobs,
    Technology,
    design_power_w,
    known_gpus,
    load_technology,
    price,
    stack_machines,
)
from dse_codesign.technology.area import package_area

TECHNOLOGY = "silicon_2026"
CALIBRATED = {
    "area": ("area.cu_control_mtr", "area.datapath_overhead"),
    "power": ("power.module_w", "power.movement_overhead"),
}
"""Figure -> coefficients that are fitted to it."""


@dataclass(frozen=True)
class PublishedFigures:
    """Published figures [N] of a kind. gpu: index of the GPU of each. predict: figures by the rules, in an order of
    figures, for a technology.
    """

    gpu: np.ndarray[Any, np.dtype[np.int64]]
    published: np.ndarray[Any, np.dtype[np.float64]]
    predict: Callable[[Coefficients], np.ndarray[Any, np.dtype[np.float64]]]

    def errors(self, technology: Coefficients) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Relative errors [N]."""
        return self.predict(technology) / self.published - 1


@cache
def _technology() -> Technology:
    return load_technology(TECHNOLOGY)


def _machines() -> MachineKnobs:
    return stack_machines([gpu.machine(_technology()) for gpu in known_gpus().gpus.values()])


def published_areas() -> PublishedFigures:
    """Areas of the compute dies of all GPUs, and of base dies where they are published."""
    machines, gpus = _machines(), list(known_gpus().gpus.values())
    based = [index for index, gpu in enumerate(gpus) if gpu.published.base_mm2]

    def predict(technology: Coefficients) -> np.ndarray[Any, np.dtype[np.float64]]:
        area = package_area(machines, technology)
        return np.concatenate([area.compute_mm2, area.base_mm2[based]])

    published = [gpu.published.compute_mm2 for gpu in gpus] + [gpus[index].published.base_mm2 or 0 for index in based]
    return PublishedFigures(np.array([*range(len(gpus)), *based]), np.array(published), predict)


def published_powers() -> PublishedFigures:
    """Powers of the boards of all GPUs."""
    machines, gpus = _machines(), list(known_gpus().gpus.values())
    published = np.array([gpu.published.power_w for gpu in gpus])
    return PublishedFigures(np.arange(len(gpus)), published, lambda technology: design_power_w(machines, technology))


def fit(figures: PublishedFigures, names: Sequence[str], used: Sequence[int]) -> dict[str, float]:
    """Values of coefficients that make the largest relative error of some figures least.

    names: coefficients in which the figures are linear. used: indices of figures.
    """
    from scipy.optimize import linprog

    nominal, index = _technology().nominal, np.array(used)
    zero = nominal.with_values(dict.fromkeys(names, 0.0))
    offset = figures.errors(zero)[index]
    columns = np.stack([figures.errors(zero.with_values({name: 1.0}))[index] - offset for name in names], axis=1)
    least = -np.ones((len(used), 1))
    bounds = np.block([[columns, least], [-columns, least]])
    solution = linprog([*np.zeros(len(names)), 1.0], A_ub=bounds, b_ub=np.concatenate([-offset, offset]))
    return dict(zip(names, solution.x[:-1].tolist(), strict=True))


def left_out_errors(figures: PublishedFigures, names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Relative errors [N] of figures, those of each GPU with coefficients that were fitted without it."""
    errors = np.empty(len(figures.published))
    for gpu in np.unique(figures.gpu):
        others = np.flatnonzero(figures.gpu != gpu).tolist()
        fitted = _technology().nominal.with_values(fit(figures, names, others))
        errors[figures.gpu == gpu] = figures.errors(fitted)[figures.gpu == gpu]
    return errors


def technology() -> dict[str, Any]:
    """Errors of area and power of public GPUs, with rows for each; errors are relative, with their signs in rows."""
    nominal, machines, gpus = _technology().nominal, _machines(), known_gpus().gpus
    costs, rows = price(machines, nominal), {name: dict[str, Any]() for name in gpus}
    result: dict[str, Any] = {}
    for kind, figures in (("area", published_areas()), ("power", published_powers())):
        unit = {"area": "mm2", "power": "w"}[kind]
        errors, left_out = figures.errors(nominal), left_out_errors(figures, CALIBRATED[kind])
        result[f"{kind}_error_worst"] = _worst(errors)
        result[f"{kind}_error_worst_left_out"] = _worst(left_out)
        for place, gpu in enumerate(figures.gpu.tolist()):
            name = kind if place < len(gpus) else f"base_{kind}"
            rows[list(gpus)[gpu]] |= {
                f"{name}_{unit}": round(float(figures.predict(nominal)[place]), 1),
                f"{name}_published_{unit}": float(figures.published[place]),
                f"{name}_error": round(float(errors[place]), 4),
                f"{name}_error_left_out": round(float(left_out[place]), 4),
            }
    rows_held_out = _held_out()
    for kind in CALIBRATED:
        result[f"{kind}_error_worst_held_out"] = max(abs(row[f"{kind}_error"]) for row in rows_held_out.values())
    for place, (name, gpu) in enumerate(gpus.items()):
        rows[name] |= {"module_usd": round(float(costs.module_usd[place])), "estimated_usd": gpu.published.cost_usd}
    return {**result, "gpus": rows, "held_out": rows_held_out}


def _held_out() -> dict[str, dict[str, float]]:
    """Figures of GPUs to which nothing was fitted."""
    rows, nominal = dict[str, dict[str, float]](), _technology().nominal
    for name, gpu in known_gpus().held_out.items():
        paid = price(gpu.machine(_technology()), nominal)
        area, power = float(paid.area.compute_mm2), float(paid.power_w)
        rows[name] = {
            "area_mm2": round(area, 1),
            "area_error": round(area / gpu.published.compute_mm2 - 1, 4),
            "power_w": round(power, 1),
            "power_error": round(power / gpu.published.power_w - 1, 4),
        }
    return rows


def _worst(errors: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return round(float(np.abs(errors).max()), 4)


def fitted_coefficients() -> dict[str, float]:
    """All calibrated coefficients, fitted to all GPUs."""
    figures = {"area": published_areas(), "power": published_powers()}
    values = dict[str, float]()
    for kind, names in CALIBRATED.items():
        values |= fit(figures[kind], names, range(len(figures[kind].published)))
    return values


def _of_search(name: str) -> dict[str, Any]:
    """Figures of a group of `validation.codesign_search`, which needs the plug-in of co-design."""
    from validation import codesign_search

    return codesign_search.GROUPS[name]()


GROUPS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "technology": technology,
    **{name: partial(_of_search, name) for name in ("inner", "outer", "claims")},
}
"""Group -> its figures."""


def _text(figures: Mapping[str, Any]) -> str:
    rows = {**figures.get("gpus", {}), **figures.get("held_out", {})}
    lines = [f"{name:<32}{value}" for name, value in figures.items() if not isinstance(value, Mapping)]
    return "\n".join([*lines, *(f"{name:<8} {row}" for name, row in rows.items())])


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures of some groups, of all by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codesign", description=str(__doc__).splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="group", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fit", action="store_true", help="print the calibrated coefficients, fitted anew")
    asked = parser.parse_args(words)
    if unknown := sorted(set(asked.groups) - set(GROUPS)):
        parser.error(f"no group called {', '.join(unknown)}")
    if asked.fit:
        print(json.dumps(fitted_coefficients(), indent=2))
        return 0
    figures = [GROUPS[name]() for name in asked.groups or GROUPS]
    print(json.dumps(dict(ChainMap(*figures)), indent=2) if asked.json else "\n\n".join(map(_text, figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
