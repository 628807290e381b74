"""Colours and markers: the same for a name everywhere, and told apart by everybody."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dse.config.options import list_options
from dse.plots.labels import COLOURS, MARKERS, declared, looks

VISION = {  # Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as it is seen
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])
LEAST = 17.0  # CIE 1976 difference; 2.3 is just noticeable
NAMES = st.lists(st.one_of(st.text(max_size=12), st.sampled_from(sorted(declared()))), unique=True, max_size=30)


def lab(colour: str, vision: str) -> NDArray[np.float64]:
    """CIELAB coordinates of a colour as it is seen."""
    channels = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(VISION[vision] @ linear, 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(first: str, second: str, vision: str) -> float:
    return float(np.linalg.norm(lab(first, vision) - lab(second, vision)))


@pytest.mark.parametrize("vision", VISION)
def test_all_colours_are_told_apart_from_each_other_and_from_paper(vision: str) -> None:
    pairs = itertools.combinations([*COLOURS.values(), "#ffffff"], 2)
    assert min(difference(*pair, vision) for pair in pairs) >= LEAST


def test_every_shipped_schedule_has_a_look() -> None:
    declared_looks = declared()
    assert set(list_options("schedule")) <= set(declared_looks)
    assert {look.marker for look in declared_looks.values()} <= set(MARKERS)


@pytest.mark.parametrize("package", ["search_spaces", "simulators", "simulators.taskgraph", "studies", "dse.search"])
def test_no_two_names_of_a_package_look_the_same(package: str) -> None:
    entries = importlib.import_module(package).LOOKS.values()
    places = Counter((colour, marker) for _, colour, marker in entries)
    assert [place for place, times in places.items() if times > 1] == []


@given(NAMES)
def test_no_two_names_of_a_figure_have_colour_and_marker_in_common(names: list[str]) -> None:
    chosen = looks(names)
    assert list(chosen) == names
    assert len({(look.colour, look.marker) for look in chosen.values()}) == len(names)


@pytest.mark.slow
def test_the_palette_is_read_without_a_drawing_library() -> None:
    code = "import sys; from dse.plots.labels import looks; looks(['serial']); print('matplotlib' in sys.modules)"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
