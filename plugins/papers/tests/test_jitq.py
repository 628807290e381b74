"""Numbers that are really quantised, copies of weights in an iteration, and `study=jitq` end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse_papers.jitq import numerics
from dse_papers.jitq.capacity import Base, Buffer, Copies, WeightCopies, capacity_saving
from simulators.hardware.pim import Format
from tests.support import shipped
from tests.test_quantised import one

FORMATS = {name: Format.model_validate(tree) for name, tree in shipped("format").items()}


SHARED = {"mx9": 7, "mx6": 4, "mx4": 2}  # bits of a magnitude


VALUES = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=70).map(np.array)


@given(VALUES, st.sampled_from(sorted(FORMATS)))
def test_quantised_values_are_near_and_stay_as_they_are(values: Any, name: str) -> None:
    format = FORMATS[name]
    once = numerics.quantise(values, format, 0)
    np.testing.assert_array_equal(numerics.quantise(once, format, 0), once)
    np.testing.assert_array_equal(
        numerics.quantise(-values, FORMATS["mx9"], 0), -numerics.quantise(values, FORMATS["mx9"], 0)
    )
    largest = np.array([np.abs(values[at - at % format.block :][: format.block]).max() for at in range(len(values))])
    element = format.element
    # half a step of the block's largest value, or what lies beyond the largest number
    reach = 2.0**-element.mantissa_bits * (2 if element.exponent_bits == 0 else 1)
    assert (np.abs(once - values) <= reach * largest + 1e-30).all()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("mx9", [1.0, 1.0 + 2**-6, 0.25, 1 / 512], [1.0, 1.0 + 2**-6, 0.25, 0.0]),  # 1/512 is below half of 2^-7
        ("mx4", [1.0, 0.7, 0.3, 0.1], [1.0, 0.5, 0.25, 0.0]),  # the second pair is shifted by one bit
        ("mxint8", [1.0, -2 + 2**-9, 0.0, 2**-6], [1.0, -2.0, 0.0, 2**-6]),
        ("mxfp8_e4m3", [448.0, 500.0, 1.0, 2**-10], [448.0, 448.0, 1.0, 0.0]),
        ("mxfp4_e2m1", [6.0, 5.1, 2.4, 0.2], [6.0, 6.0, 2.0, 0.0]),
        ("mxfp4_e2m1", [6.0, 2.5, 0.25, 0.75], [6.0, 2.0, 0.0, 1.0]),  # ties to even
    ],
)
def test_a_block_is_rounded_as_its_specification_says(name: str, values: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(numerics.quantise(np.array(values), FORMATS[name], 0), expected)


def test_blocks_lie_along_the_axis_that_is_named() -> None:
    values = np.ones((32, 32))
    values[0, :] = 1e4
    rows, cols = (numerics.quantise(values, FORMATS["mxfp4_e2m1"], axis) for axis in (0, 1))
    assert (rows[1:] == 0).all() and (cols[1:] == 1).all()
    with pytest.raises(ValueError, match="finite"):
        numerics.quantise(np.array([np.inf]), FORMATS["mx9"], 0)


@pytest.mark.slow
def test_more_bits_err_less_and_copies_of_mx9_train_like_none() -> None:
    errors = pd.DataFrame(numerics.errors({name: FORMATS[name] for name in SHARED})).set_index(["weights", "format"])
    for kind in ("normal", "heavy tails"):
        for column in ("weights_db", "forward_db", "backward_db"):
            mx9, mx6, mx4 = errors.loc[kind][column].astype(float)
            # a bit of mantissa is 6 dB
            assert mx9 - mx6 == pytest.approx(18.1, abs=2)
            assert mx6 - mx4 == pytest.approx(12.0, abs=2)
    copies = {name: (FORMATS[name], FORMATS[name]) for name in ("mx9", "mx4")}
    loss = {row["copies"]: row["loss"] for row in numerics.losses({"none": (None, None), **copies})}
    assert abs(loss["mx9"] / loss["none"] - 1) < 0.1 < loss["mx4"] / loss["none"] - 1


@pytest.mark.parametrize(("format", "other"), [("mx9", None), ("mx9", "mx6"), ("mx6", None)])
def test_what_is_saved_is_what_the_accounting_of_capacity_says(format: str, other: str | None) -> None:
    """Layers alone, of Adam at mixed precision: 2 + 2 + 12 B of a weight, copies both ways, two layers in flight."""
    layers = {"model.vocab": 0, "model.layers": 48, "model.hidden": 4096, "model.heads": 64, "model.ffn": 16384}
    backward = {"backward": shipped("format")[other] if other else None, "stored": "all"}
    stored, in_memory = (one(layers, way, format=format, **backward) for way in ("stored", "pim"))
    formats = [Format.model_validate(shipped("format")[name]) for name in filter(None, (format, other))]
    both = [WeightCopies(format=number_format) for number_format in formats]
    base = Base(weights="fp32", gradients="fp32", momentum="fp32", variance="fp32")
    saving = capacity_saving(base, Copies(forward=both[0], backward=both[1] if other else None))
    assert stored["bytes_per_parameter"] == pytest.approx(saving.stored_bytes, rel=2e-3)  # biases have no copies
    buffer = Buffer(num_layers=48, layers_in_flight=2).layers_in_flight / 48 * formats[0].bytes_per_element
    assert in_memory["bytes_per_parameter"] == pytest.approx(saving.base_bytes + buffer, rel=2e-3)
    assert in_memory["copy_bytes"] == pytest.approx(
        in_memory["state_bytes"] * buffer / (saving.base_bytes + buffer), rel=2e-3
    )


def _study(folder: Path, *words: str) -> Path:
    few = ["tracking=none", "store=none", "timeline=false"]
    assert main(["study=jitq", f"output_dir={folder}", *few, *words]) == 0
    return max((folder / "jitq").glob("2*"))


@pytest.mark.nightly
def test_the_study_judges_its_claims(tmp_path: Path) -> None:
    folder = _study(tmp_path)
    rows = {row["id"].partition(".")[2]: row for row in json.loads((folder / "claims.json").read_text("utf-8"))}
    assert {name for name, row in rows.items() if row["within"] is False} == {"capacity_saved"}
    assert [name for name, row in rows.items() if row["within"] is None] == []
    assert "is not public" in rows["capacity_saved"]["reason"]
    accounts = pd.read_parquet(folder / "accountings.parquet")
    assert len(accounts) == 24
    assert accounts["saved"].between(0.08, 0.49).all()
    systems = pd.read_parquet(folder / "systems.parquet").set_index(["pim", "copies"])
    assert {pim for pim, _ in systems.index} == {"hbm2_pim", "hbm3_strawman", "lpddr5x"}
    assert systems.index.is_unique
    lost = dict(zip(systems.index, systems["throughput_lost"].to_numpy(float), strict=True))
    for pim in ("hbm2_pim", "hbm3_strawman", "lpddr5x"):
        assert lost[pim, "pim"] < lost[pim, "gpu"]
    mu = pd.read_parquet(folder / "contention.parquet")["mu"]
    assert mu.between(0, 1).all()
    assert mu.nunique() > 5
    assert "by burst_rows 1: " in rows["throughput_loss"]["reason"]
    assert "by beside all: " in rows["throughput_loss"]["reason"]
    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert figures == {"front", "bursts", "units", "capacity", "turns", "numbers"}
