"""Published values in the figures of a study, as `published.yaml` beside its claims lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictBool, StrictFloat, StrictInt, model_validator

from dse.errors import Problems, did_you_mean
from dse.errors.parsing import load
from dse.plots.references import Reference
from dse.results.claims import Claim
from dse.values import Frozen

_WORDS: Mapping[str, str] = {"memory": "recalled, unverified", "derived": "derived"}


class _Place(Frozen):
    """Place of the value of a claim in a figure.

    label: words for it. as_gain: a share in percent that the axis shows as a ratio, 43 % as 1.43. in_words: in the note
    of the figure, which has no axis for it. of, panel, row, at: of `dse.plots.references.Reference`.
    """

    claim: str
    label: str
    as_gain: StrictBool = False
    in_words: StrictBool = False
    of: str = ""
    panel: str = ""
    row: str = ""
    at: StrictInt | StrictFloat | None = None

    def reference(self, claim: Claim) -> Reference:
        """Return the value with its provenance; one from memory is never called published."""
        value = claim.value if isinstance(claim.value, tuple) else (claim.value,)
        low, high = (1 + number / 100 if self.as_gain else float(number) for number in (value[0], value[-1]))
        unit = {"%": " %", "x": "x"}.get("x" if self.as_gain else claim.unit, "")
        label = f"{_WORDS.get(claim.provenance, 'published')}, {self.label}"
        return Reference(
            label, low, high, of=self.of, panel=self.panel, row=self.row, at=self.at, unit=unit, in_words=self.in_words
        )


class _Entry(Frozen):
    """A figure in `published.yaml`. figure: its name, with wildcards; number: that of the paper's own figure; values:
    claims that it shows; none: why it shows no claim.
    """

    figure: str
    number: str = ""
    values: tuple[_Place, ...] = ()
    none: Annotated[str, Field(max_length=200)] = ""

    @model_validator(mode="after")
    def _values_or_a_reason(self) -> _Entry:
        if bool(self.values) == bool(self.none):
            raise ValueError("needs values, or the reason why it shows none")
        return self


@dataclass(frozen=True)
class PublishedFigure:
    """Values that others published of a figure.

    figure: its name, with wildcards; references: the values; reason: why there are none; origin: number of the paper's
    own figure, if known, and sources of the values.
    """

    figure: str
    references: tuple[Reference, ...] = ()
    reason: str = ""
    origin: str = ""


def read(path: Path, claims: Sequence[Claim]) -> list[PublishedFigure]:
    """Figures of a study. Raises ConfigError, also for a claim that does not exist or has no number."""
    check, by_id = Problems(), {claim.id: claim for claim in claims}
    rows = load(path.read_text(encoding="utf-8"), path.name)
    entries = [check.model(_Entry, row, path=f"{path.name}[{index}]") for index, row in enumerate(rows)]
    for place in (place for entry in entries if entry for place in entry.values):
        if place.claim not in by_id:
            way = did_you_mean(place.claim, by_id)
            check.add(path.name, "names no claim of this study", value=place.claim, way_out=way)
        elif isinstance(by_id[place.claim].value, bool):
            check.add(path.name, "names a claim without a number", value=place.claim)
    check.done()
    return [_figure(entry, by_id) for entry in entries if entry]


def _figure(entry: _Entry, by_id: Mapping[str, Claim]) -> PublishedFigure:
    claims = [by_id[place.claim] for place in entry.values]
    sources = "; ".join(dict.fromkeys(claim.source for claim in claims))
    origin = ": ".join(filter(None, (entry.number and f"{entry.number} of the paper", sources)))
    references = tuple(place.reference(claim) for place, claim in zip(entry.values, claims, strict=True))
    return PublishedFigure(entry.figure, references, entry.none, origin)


def values_of(figures: Sequence[PublishedFigure], name: str) -> PublishedFigure:
    """Return what is published of a figure; nothing, and no reason, where it is not listed."""
    return next((figure for figure in figures if fnmatchcase(name, figure.figure)), PublishedFigure(name))
