"""Passes of processing in memory over weights: published figures, commands by format and direction, monotony."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import shipped
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dse.problems import ConfigError
from dse.values import put
from simulators.mx import Format
from simulators.pim import Direction, InstructionSet, PimPart, commands_per_word, gain, gpu_quantise_s, quantise_s

PARTS = {name: PimPart.model_validate(tree) for name, tree in shipped("pim").items()}
SETS = {name: InstructionSet.model_validate(tree) for name, tree in shipped("instructions").items()}
FORMATS = {name: Format.model_validate(tree) for name, tree in shipped("format").items()}
BF16 = 2.0
LAYER = 12 * 12288**2 / 8  # parameters of a transformer layer of H = 12288 on one of 8 GPUs
parts, formats, sets = (st.sampled_from(sorted(one)) for one in (PARTS, FORMATS, SETS))


def commands(
    instructions: str, format: str = "mx9", direction: Direction = "lanes", part: str = "hbm3_strawman"
) -> float:
    return float(commands_per_word(SETS[instructions], PARTS[part], FORMATS[format], direction, BF16))


@pytest.mark.parametrize("one", [*PARTS.values(), *SETS.values()], ids=lambda one: one.name)
def test_every_constant_has_a_source_and_every_source_a_constant(one: PimPart | InstructionSet) -> None:
    facts = [path.partition(".")[2] for path, *_ in one.facts_below(one.name)]
    assert all(any(fact == path or fact.startswith(f"{path}.") for fact in facts) for path in one.sources)


# Published figures


def test_rows_stream_as_in_the_published_example() -> None:
    """6144 x 2048 INT8 on 128 banks: 48 rows of 64 words, 14.98 us of 19.04 us."""
    part = PARTS["lpddr5x"]
    assert part.units == 128
    found = quantise_s(part, 6144 * 2048, 1.0, source_bytes=1.0)
    assert found == pytest.approx(48 * (64 * 4.266667e-9 + 39e-9), rel=1e-9)
    assert 1e6 * found == pytest.approx(14.98, abs=0.005)


def test_gains_over_the_interface() -> None:
    assert gain(PARTS["hbm2_pim"]) == pytest.approx(4.0, rel=1e-12)  # 64 against 16 GB/s of a pseudo-channel
    assert gain(PARTS["hbm3_strawman"]) == pytest.approx(4.0, abs=0.005)
    assert gain(PARTS["lpddr5x"]) == pytest.approx(8.0, abs=0.005)
    assert all(3.99 <= gain(part) <= 8.01 for part in PARTS.values())


def test_a_gain_does_not_depend_on_stacks_and_follows_the_command_rate() -> None:
    part = PARTS["hbm3_strawman"]
    assert gain(put(part, "stacks", np.array([1, 4, 8]))) == pytest.approx([gain(part)] * 3)
    assert gain(put(part, "command_rate", 0.5)) == pytest.approx(gain(part) / 2)
    assert gain(put(part, "banks_per_unit", np.array([1, 2, 4]))) == pytest.approx(gain(part) * np.array([2, 1, 0.5]))


def test_commands_of_mx9_are_those_that_were_counted() -> None:
    assert commands("fused") == 2.5625  # 2.6
    assert commands("plain") == 5.5625  # 5 to 6
    assert commands("plain", direction="word") == 13.5625  # 14
    assert commands("fused", direction="word") == commands("fused")


def test_commands_follow_the_format() -> None:
    assert commands("plain", "mx6") == 5 + 6 / 16
    assert commands("plain", "mxfp8_e4m3") == 4 + 8.25 / 16  # no microexponent
    assert commands("plain", "mxfp8_e4m3", "word") == commands("plain", "mxfp8_e4m3") + 8  # 16 lanes, blocks of 32


def test_a_layer_takes_about_what_a_prototype_found() -> None:
    """0.30 ms beside 5.1 ms of the forward GEMMs; serialised, a loss of 1.8, 3.9 and 8.6 % (48 ns a row there)."""
    part = PARTS["hbm3_strawman"]
    gemm_s = 2 * 2048 * LAYER / (0.5 * 362e12)
    assert gemm_s == pytest.approx(5.1e-3, rel=0.01)
    assert quantise_s(part, LAYER, 6, source_bytes=BF16) == pytest.approx(0.30e-3, rel=0.05)
    passes = quantise_s(put(part, "trcd_s", 33e-9), LAYER, np.array([2.6, 6, 14]), source_bytes=BF16)
    assert 100 * 2 * passes / (3 * gemm_s) == pytest.approx([1.8, 3.9, 8.6], abs=0.06)
    assert 100 * quantise_s(part, LAYER, 2.6, source_bytes=BF16) * 2 / (3 * gemm_s) <= 1.8


def test_the_gpu_takes_about_what_a_prototype_found() -> None:
    found = gpu_quantise_s(LAYER, FORMATS["mx9"], 4 * 614.4e9, efficiency=1.0, source_bytes=BF16)
    assert found == pytest.approx(LAYER * 3.125 / 2.4576e12)
    assert 100 * found / (2 * 2048 * LAYER / (0.5 * 362e12)) == pytest.approx(5.7, abs=0.1)
    half = gpu_quantise_s(LAYER, FORMATS["mx9"], 4 * 614.4e9, efficiency=0.5, source_bytes=BF16)
    assert half == pytest.approx(2 * found)


# What must hold


@given(parts, st.floats(1, 1e9), st.floats(1, 100), st.sampled_from(["stacks", "command_rate", "row_bytes"]))
def test_more_hardware_is_never_slower_and_more_work_never_faster(
    name: str, parameters: float, count: float, knob: str
) -> None:
    part = PARTS[name]
    plain = quantise_s(part, parameters, count, source_bytes=BF16)
    assert quantise_s(put(part, knob, 2 * getattr(part, knob)), parameters, count, source_bytes=BF16) <= plain
    assert quantise_s(put(part, "banks_per_unit", 4), parameters, count, source_bytes=BF16) >= plain
    assert quantise_s(part, 2 * parameters, count, source_bytes=BF16) >= plain
    assert quantise_s(part, parameters, 2 * count, source_bytes=BF16) > plain
    assert plain >= parameters * BF16 / part.word_bytes / part.units * count * part.command_s


@given(parts, formats, sets)
def test_a_fused_set_and_blocks_across_words_need_no_more_commands(part: str, format: str, name: str) -> None:
    across, along = (commands(name, format, direction, part) for direction in ("lanes", "word"))
    assert across <= along
    assert commands("fused", format, "lanes", part) < commands("plain", format, "lanes", part)


def test_knobs_may_be_arrays() -> None:
    part = put(PARTS["hbm3_strawman"], "banks_per_unit", np.array([1, 2, 4])[:, None])
    found = quantise_s(part, LAYER, np.array([2.6, 6, 14]), source_bytes=BF16)
    assert found.shape == (3, 3)
    for i, banks in enumerate((1, 2, 4)):
        for j, count in enumerate((2.6, 6, 14)):
            one = put(PARTS["hbm3_strawman"], "banks_per_unit", banks)
            assert found[i, j] == quantise_s(one, LAYER, count, source_bytes=BF16)


def test_turn_arounds_are_counted_once_a_row() -> None:
    plain, turned = (
        quantise_s(PARTS["lpddr5x"], 6144 * 2048, 1.0, source_bytes=1.0, turn_around=wanted) for wanted in (False, True)
    )
    assert turned - plain == pytest.approx(48 * (18.13333333e-9 + 12e-9))


# What is refused


def test_turn_arounds_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pim.turn_arounds: is not known of hbm3_strawman \(leave turn-arounds out"):
        quantise_s(PARTS["hbm3_strawman"], LAYER, 6, source_bytes=BF16, turn_around=True)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"banks_per_unit": 3}, "does not divide banks_per_channel = 16"),
        ({"tccdl_s": 4}, "less than or equal"),
        ({"sources": {}}, "no entry in `sources`"),
    ],
)
def test_a_part_that_cannot_be_is_refused(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        PimPart.model_validate({**shipped("pim")["hbm2_pim"], **change})
