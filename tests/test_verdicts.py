"""Verdicts under uncertain constants: which constants are moved, what a move changes, and what is said of a claim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.analysis.verdicts import SPREAD, UNCERTAIN, ConstantChange, moved, moves
from dse.cli import main
from dse.results.claims import Claim, ClaimResult, error
from dse.results.report import error_text, flips_text
from dse.space import get_path
from dse.study.plan_again import plan_words

STUDIES = ("t3", "fused_ops", "conccl", "comp_vs_comm")
NUMBERS = st.floats(1e-3, 1e3)


def claim(value: Any, kind: str = "exact", tolerance: tuple[float, float] = (0.0, 1.0)) -> Claim:
    named = {"id": "x", "statement": "x", "metric": "x", "unit": "x", "provenance": "abstract", "source": "a paper"}
    return Claim.model_validate({**named, "value": value, "kind": kind, "tolerance": tolerance})


@given(NUMBERS, NUMBERS)
def test_an_error_is_positive_where_ours_is_larger(ours: float, published: float) -> None:
    share = error(claim(published), ClaimResult(ours))
    assert share is not None
    assert share == pytest.approx(ours / published - 1)
    assert (share > 0) == (ours > published)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_a_range_has_no_error_inside_and_that_of_the_nearer_end_outside(
    ours: float, first: float, other: float
) -> None:
    low, high = sorted((first, other))
    share = error(claim((low, high), "band", (low, high)), ClaimResult(ours))
    assert share is not None
    assert share == pytest.approx(max(0.0, ours / high - 1) + min(0.0, ours / low - 1))


@pytest.mark.parametrize(("value", "ours"), [(True, False), (3.0, None), ((1.0, 2.0), (1.0, 3.0))])
def test_what_is_no_number_has_no_error(value: Any, ours: Any) -> None:
    assert error(claim(value, tolerance=(-1.0, 1.0)), ClaimResult(ours)) is None


def test_an_error_is_printed_with_its_sign() -> None:
    row = {"error": 0.123, "provenance": "abstract"}
    assert error_text(row) == "+12 %"
    assert error_text({**row, "error": -0.0031}) == "-0.31 %"
    assert error_text({**row, "provenance": "memory"}) == ""


def test_a_claim_says_what_turns_its_verdict() -> None:
    assert flips_text({"flips": None}) == ""
    assert flips_text({"flips": []}) == "stands"
    assert flips_text({"flips": [str(ConstantChange("system.gpu.x", 0.8))]}) == "flips with system.gpu.x x 0.8"


@pytest.mark.one_in(4, 1)
@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_constants_that_are_moved_are_those_whose_source_is_uncertain(study: str) -> None:
    planned = plan_words([f"study={study}"])
    facts = [
        fact for space in planned.spaces.values() for fact in planned.backend.facts(planned.backend.design(space.base))
    ]
    numbers = {
        path: kind for path, value, kind, _ in facts if isinstance(value, float) and value and "cost_" not in path
    }
    paths = {move.path for move in moves(planned)}
    certain = {path for path, kind in numbers.items() if kind not in UNCERTAIN}
    options = planned.request.options.get("system", {})
    assert paths.isdisjoint(planned.knobs)
    assert {path for path, kind in numbers.items() if kind in UNCERTAIN} - set(planned.knobs) <= paths
    assert options or paths.isdisjoint(certain)  # a constant may be certain on one of several systems alone


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_a_move_changes_one_number_and_leaves_the_plan_as_it_was(study: str) -> None:
    planned = plan_words([f"study={study}"])
    designs = {name: planned.backend.design(space.base) for name, space in planned.spaces.items()}
    present = [move for move in moves(planned) if move.factor > 1 and move.path.endswith("_s")]
    move = next(move for move in present if all(get_path(design, move.path) for design in designs.values()))
    before = {name: get_path(design, move.path) for name, design in designs.items()}
    changed = moved(planned, move)
    for name, space in changed.spaces.items():
        assert get_path(planned.backend.design(space.base), move.path) == pytest.approx(move.factor * before[name])
        assert get_path(planned.backend.design(planned.spaces[name].base), move.path) == before[name]
        unchanged = {path: value for path, value in space.base.items() if path != move.path.partition(".")[0]}
        assert unchanged == {path: planned.spaces[name].base[path] for path in unchanged}


@pytest.mark.slow
def test_a_source_may_say_how_far_off_its_number_is() -> None:
    pytest.importorskip("dse_papers")
    factors: dict[str, list[float]] = {}
    for move in moves(plan_words(["study=goldyloc"])):
        factors.setdefault(move.path, []).append(move.factor)
    assert factors["system.gpu.gemm.half_occupancy"] == pytest.approx([0.4, 1.6])
    known_factors = {path: pair for path, pair in factors.items() if not path.endswith("half_occupancy")}
    assert all(pair == pytest.approx([1 - SPREAD, 1 + SPREAD]) for pair in known_factors.values())


@pytest.mark.nightly
def test_a_finished_run_says_which_verdicts_stand(tmp_path: Path) -> None:
    pytest.importorskip("dse_calibration")
    words = ["tracking=none", "store=none", "timeline=false", "figures=none", f"output_dir={tmp_path}"]
    assert main(["study=overlap_measured", *words]) == 0
    assert main(["results", "robustness", "study=overlap_measured", "claims=true", f"output_dir={tmp_path}"]) == 0
    folder = tmp_path / "overlap_measured" / "latest"
    rows = json.loads((folder / "claims.json").read_text("utf-8"))
    verdicts = json.loads((folder / "verdicts.json").read_text("utf-8"))
    assert {row["id"] for row in rows if row["flips"] is not None} == set(verdicts["claims"])
    assert all((row["flips"] is None) == (row["within"] is None) for row in rows)
