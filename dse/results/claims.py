"""Published claims, and ours beside them: within tolerance, missed, or not testable with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import StrictBool, StrictFloat, StrictInt, model_validator

from dse.errors import Problems
from dse.errors.parsing import load
from dse.values import Frozen, Provenance


class Claim(Frozen):
    """One published statement. tolerance: accepted band [low, high] in the claim's unit, None for a yes or no.

    Of a list of values, the tolerance is for the difference of each. at_most: value is no measurement but the largest
    that is accepted, where the tolerance ends.
    """

    id: str
    statement: str
    metric: str
    value: StrictBool | StrictInt | StrictFloat | tuple[StrictFloat, ...]
    unit: str
    kind: Literal["exact", "band", "qualitative", "max", "mean", "geomean", "at_most"]
    tolerance: tuple[StrictFloat, StrictFloat] | None
    provenance: Provenance
    source: str

    @model_validator(mode="after")
    def _a_bound_is_where_the_tolerance_ends(self) -> Claim:
        if self.kind == "at_most" and (self.tolerance is None or self.tolerance[1] != self.value):
            raise ValueError("at_most needs a tolerance that ends at its value")
        return self


Basis = Literal["predicted", "fitted", "by construction", "input"]
"""What a finding rests on. predicted: no number was adjusted to it; fitted: constants were; by construction: the model
cannot say otherwise; input: the published value, or a constant taken from it, is put in. Predictions alone test it."""


@dataclass(frozen=True)
class ClaimResult:
    """Our value for a claim (None: cannot be tested) with a remark, the cause if it is a miss, and its basis."""

    ours: float | bool | tuple[float, ...] | None
    remark: str = ""
    cause: str = ""
    basis: Basis = "predicted"


def read(path: Path) -> list[Claim]:
    """Claims of one paper from YAML. Raises ConfigError."""
    check = Problems()
    rows = load(path.read_text(encoding="utf-8"), path.name)
    claims = [check.model(Claim, row, path=f"{path.name}[{index}]") for index, row in enumerate(rows)]
    check.done()
    return [claim for claim in claims if claim is not None]


def judge(claims: Sequence[Claim], findings: Mapping[str, ClaimResult], *, departure: str = "") -> list[dict[str, Any]]:
    """One row per claim for `claims.json`: theirs, ours, `within` (null with the reason where it cannot be tested).

    `error`: our value over the published one, less one, with its sign; of a range that was published, over the end that
    it is beyond, 0 within; null where it says nothing. `flips`: constants that turn the verdict, null until
    `dse.analysis.verdicts` was asked.

    departure: how the configuration differs from the one the claims are about; then none can be tested.
    """
    if departure:
        findings = {claim.id: ClaimResult(None, departure) for claim in claims}
    return [_row(claim, findings.get(claim.id, ClaimResult(None, "this study does not test it"))) for claim in claims]


def _row(claim: Claim, finding: ClaimResult) -> dict[str, Any]:
    row = claim.model_dump(mode="json")
    verdict = within(claim, finding)
    reason = "; ".join(filter(None, [finding.remark, finding.cause if verdict is False else ""]))
    published = {"published": row.pop("value"), "ours": finding.ours, "error": error(claim, finding)}
    return {**row, **published, "within": verdict, "basis": finding.basis, "reason": reason, "flips": None}


def error(claim: Claim, finding: ClaimResult) -> float | None:
    """Signed relative error of ours against a published number or range; None for a yes or no, a bound, or lists."""
    ours, value = finding.ours, claim.value
    if ours is None or isinstance(ours, bool) or isinstance(value, bool) or claim.kind == "at_most":
        return None
    if claim.kind == "band":
        low, high = (value[0], value[-1]) if isinstance(value, tuple) else claim.tolerance or (value, value)
        # of several values the worst
        return min((_beyond(each, low, high) for each in _each(ours)), key=lambda share: -abs(share))
    if isinstance(ours, tuple) or isinstance(value, tuple) or not value:  # a share of nothing is no error
        return None
    return ours / value - 1


def _beyond(ours: float, low: float, high: float) -> float:
    """Relative distance of a value from the nearer end of a range, 0 inside it; absolute where the end is 0."""
    end = low if ours < low else high if ours > high else ours
    return (ours - end) / (abs(end) or 1.0)


def within(claim: Claim, finding: ClaimResult) -> bool | None:
    """Return whether our value is in the accepted band, with both ends if it is a range; None if we have none."""
    if finding.ours is None:
        return None
    if claim.tolerance is None or isinstance(finding.ours, bool):
        return finding.ours == claim.value  # a yes or no
    low, high = claim.tolerance
    if claim.kind == "band":
        return all(low <= ours <= high for ours in _each(finding.ours))
    if isinstance(finding.ours, tuple) or isinstance(claim.value, tuple):
        pairs = zip(finding.ours, claim.value, strict=True)  # type: ignore[arg-type]
        return all(low <= ours - theirs <= high for ours, theirs in pairs)
    return low <= finding.ours <= high


def _each(ours: float | tuple[float, ...]) -> tuple[float, ...]:
    return ours if isinstance(ours, tuple) else (ours,)
