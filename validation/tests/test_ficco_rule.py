"""FiCCO's learnt rule: how it picks, how it is judged, and that it is learnt on other shapes than the paper's."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.analysis.contexts import Cases
from simulators.workloads.operators import ShapeList
from studies.ficco import Node, judge_rule, learnt_rule, pick, tree_lines
from tests.support import shipped
from validation.ficco_rule import CHOOSE, drawn_shapes, kind, rule_of

SIZE = "workload.operators.gemm"
SERIAL, DEEP, FLAT = ("serial", None, None, None), ("chunked", "k", True, "fused"), ("chunked", "m", True, "fused")


def leaves(node: Node) -> set[str]:
    """Kinds that a tree picks."""
    return {node["pick"]} if "pick" in node else leaves(node["then"]) | leaves(node["else"])


def made_cases() -> Cases:
    """Shapes where slices of k are fastest if A is deeper than high, and else chunks of m; serial is 3 % slower."""
    sizes = np.array(list(product(2.0 ** np.arange(10, 18), 2.0 ** np.arange(10, 14), 3 * 2.0 ** np.arange(9, 17))))
    deep = sizes[:, 0] < sizes[:, 2]
    values = np.stack([np.full(len(sizes), 1.03), np.where(deep, 1.0, 1.2), np.where(deep, 1.2, 1.0)], axis=1)
    inputs = {f"{SIZE}.{name}": sizes[:, place] for place, name in enumerate("mnk")}
    every = np.arange(len(sizes))
    return Cases(CHOOSE, (SERIAL, DEEP, FLAT), values, inputs, every, np.zeros_like(every))


def test_a_rule_of_two_sizes_is_found_and_written_as_it_picks() -> None:
    rule = rule_of(made_cases())
    assert len(list(tree_lines(rule["tree"]))) == 4  # one split
    for m, k in ((8192, 7000), (7000, 8192), (1 << 20, 4096)):
        assert pick({"m": m, "n": 1024, "k": k}, rule["tree"]) == kind(DEEP if m < k else FLAT)
    assert set(rule["left_out_accuracy"].values()) == {1.0}


def test_the_shipped_rule_is_learnt_on_other_shapes_than_the_papers() -> None:
    sixteen = {(shape.m, shape.n, shape.k) for shape in ShapeList.model_validate(shipped("workload")["ficco"]).listed}
    shapes = {shape.name: shape for shape in ShapeList.model_validate(shipped("workload")["learning"]).listed}
    drawn = [shapes[name] for name in drawn_shapes()]
    assert len(drawn) == learnt_rule()["shapes"]
    assert not sixteen & {(shape.m, shape.n, shape.k) for shape in drawn}
    assert learnt_rule()["provenance"] == "derived"
    assert leaves(learnt_rule()["tree"]) <= set(learnt_rule()["kinds"])


@given(sizes=st.fixed_dictionaries(dict.fromkeys("mnk", st.integers(64, 1 << 21))))
def test_every_shape_has_a_pick(sizes: dict[str, int]) -> None:
    assert pick(dict(sizes)) in learnt_rule()["kinds"]


@pytest.mark.parametrize(("longer", "right", "near"), [(1.0, 100, 100), (1.01, 50, 100), (1.05, 50, 50)])
def test_a_pick_is_right_if_no_kind_is_faster_and_near_within_two_per_cent(
    longer: float, right: float, near: float
) -> None:
    rows = []
    for place, shape in enumerate(((131072, 8192, 8192), (8192, 8192, 262144))):
        chosen = pick(dict(zip("mnk", map(float, shape), strict=True)))
        for name in learnt_rule()["kinds"]:
            seconds = 2.0 if name != chosen else longer if place else 1.0
            rows.append({"scenario": f"g{place}", "schedule.name": name, "makespan_s": seconds})
            rows[-1] |= {f"{SIZE}.{axis}": size for axis, size in zip("mnk", shape, strict=True)}
    other = next(row for row in reversed(rows) if row["schedule.name"] != chosen)
    other["makespan_s"] = 1.0  # of the second shape: the fastest kind, unless the pick is as fast
    result = judge_rule(pd.DataFrame(rows), SIZE)
    assert result.ours == right
    assert f"within 2 % of the best in {near} %" in result.remark


def test_one_shape_alone_or_several_machines_are_not_judged() -> None:
    row: dict[str, object] = {
        "scenario": "g1",
        "schedule.name": "serial",
        "makespan_s": 1.0,
        **{f"{SIZE}.{axis}": 64 for axis in "mnk"},
    }
    assert judge_rule(pd.DataFrame([row]), SIZE).ours is None
    kinds = [{**row, "scenario": name, "schedule.name": kind} for name in "ab" for kind in learnt_rule()["kinds"]]
    assert judge_rule(pd.DataFrame(kinds), SIZE).ours is not None
    machines = [{**kind, "system.gpu.num_cus": count} for kind in kinds for count in (152, 304)]
    assert judge_rule(pd.DataFrame(machines), SIZE).ours is None
