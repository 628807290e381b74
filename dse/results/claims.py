"""Published claims, and ours beside them: within tolerance, missed, or not testable with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import StrictBool, StrictFloat, StrictInt, model_validator

from dse.errors import Problems
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
class Finding:
    """Our value for a claim (None: cannot be tested) with a remark, the cause if it is a miss, and its basis."""

    ours: float | bool | tuple[float, ...] | None
    remark: str = ""
    cause: str = ""
    basis: Basis = "predicted"


def read(path: Path) -> list[Claim]:
    """Claims of one paper from YAML. Raises ConfigError."""
    check = Problems()
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    claims = [check.model(Claim, row, path=f"{path.name}[{index}]") for index, row in enumerate(rows)]
    check.done()
    return [claim for claim in claims if claim is not None]


def judge(claims: Sequence[Claim], findings: Mapping[str, Finding], *, departure: str = "") -> list[dict[str, Any]]:
    """One row per claim for `claims.json`: theirs, ours, `within` (null with the reason where it cannot be tested).

    departure: how the configuration differs from the one the claims are about; then none can be tested.
    """
    if departure:
        findings = {claim.id: Finding(None, departure) for claim in claims}
    return [_row(claim, findings.get(claim.id, Finding(None, "this study does not test it"))) for claim in claims]


def _row(claim: Claim, finding: Finding) -> dict[str, Any]:
    row = claim.model_dump(mode="json")
    verdict = within(claim, finding)
    reason = "; ".join(filter(None, [finding.remark, finding.cause if verdict is False else ""]))
    published = {"published": row.pop("value"), "ours": finding.ours, "within": verdict}
    return {**row, **published, "basis": finding.basis, "reason": reason}


def within(claim: Claim, finding: Finding) -> bool | None:
    """Return whether our value is in the accepted band, with both ends if it is a range; None if we have none."""
    if finding.ours is None:
        return None
    if claim.tolerance is None or isinstance(finding.ours, bool):
        return finding.ours == claim.value
    low, high = claim.tolerance
    if claim.kind == "band":
        return all(low <= ours <= high for ours in _each(finding.ours))
    if isinstance(finding.ours, tuple) or isinstance(claim.value, tuple):
        pairs = zip(finding.ours, claim.value, strict=True)  # type: ignore[arg-type]
        return all(low <= ours - theirs <= high for ours, theirs in pairs)
    return low <= finding.ours <= high


def _each(ours: float | tuple[float, ...]) -> tuple[float, ...]:
    return ours if isinstance(ours, tuple) else (ours,)
