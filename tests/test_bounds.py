"""What a user names or types is bounded before it is read or made: refused with a sentence, soon, in little memory."""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse import files
from dse.cli import main
from dse.config import expansion
from dse.config.expansion import MOST_VALUES
from dse.errors import ConfigError
from simulators.workloads.operators import read_shapes

S = ["study=ficco_sweep", "tracking=none", "fidelity=none", "store=none", "timeline=false", "schedule=serial"]
CUS = "+space.system.gpu.num_cus"
RATE = "+space.system.gpu.hbm_bytes_per_s"


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Run the command line in little more memory, see that it refuses; what it says."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), limits[1]))

    def run(*words: str) -> str:
        code = main(words)
        message = capsys.readouterr().err
        assert code == 2, message
        assert "Traceback" not in message
        return message

    yield run
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweep", "part"),
    [
        (f"{CUS}='range(1,200000000)'", "holds 2.000e+8 values"),
        (f"{CUS}='choice([1,2],[3])'", "not a list or a mapping"),
        (f"{CUS}='choice({{a:1}},2)'", "not a list or a mapping"),
        (f"{CUS}='range(200000000,1,-1)'", "holds 2.000e+8 values"),
        (f"{CUS}='int(interval(1,1e308))'", "holds 1.000e+308 values"),
        (f"{CUS}='tag(log,interval(1,1e308))'", "holds 1.000e+308 values"),
        (f"{CUS}='interval(1,2000000)'", "holds 2.000e+6 values"),
        (f"{RATE}='range(0,1,1e-300)'", "holds 1e+300 values"),
        (f"{RATE}='range(0,inf)'", "finite ends"),
        (f"{RATE}='range(0,1,nan)'", "finite ends"),
        (f"{RATE}='range(0.0,1.0,0)'", "other than 0"),
    ],
)
def test_the_values_of_a_knob_are_counted_before_they_are_made(
    sweep: str, part: str, refused: Callable[..., str]
) -> None:
    message = refused(*S, sweep.replace("'", ""))
    assert part in message
    assert sweep.partition("=")[0].lstrip("+") in message


@pytest.mark.parametrize(
    "words", [["x=range(0,1,1e-300)"], ["x=range(1,200000000)"], ["x=range(9999)", "y=range(9999)"]]
)
def test_the_studies_of_a_multirun_are_counted_before_they_are_listed(
    words: list[str], refused: Callable[..., str]
) -> None:
    assert re.search("1,000,000|1000000", refused(*S, *words, "--multirun"))


@pytest.mark.slow
@given(st.integers(-50, 50), st.integers(1, 30), st.sampled_from([1, 2, 3, -1, 0.5, 0.1, 0.25]))
def test_a_range_has_as_many_values_as_it_is_counted_to_have(start: int, length: int, step: float) -> None:
    from hydra.core.override_parser.types import RangeSweep

    from dse.config.expansion import range_size

    stop = start + length if step > 0 else start - length
    sweep = RangeSweep(start=start, stop=stop, step=step)
    assert range_size(sweep) == len(list(sweep.range())) <= MOST_VALUES


@pytest.fixture(params=["device", "FIFO", "folder", "socket", "large"])
def odd(request: pytest.FixtureRequest, elsewhere: Path) -> Iterator[tuple[Path, str]]:
    """A path that is no file to read, and what is said of it."""
    path, kind = elsewhere / "odd.csv", str(request.param)
    if kind == "device":
        yield Path("/dev/zero"), "a device"
    elif kind == "FIFO":
        os.mkfifo(path)
        yield path, "a FIFO"
    elif kind == "folder":
        path.mkdir()
        yield path, "a folder"
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("odd.csv")
            yield path, "a socket"
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)  # sparse: it takes no room
        yield path, "is larger than"


def test_only_a_plain_file_of_a_bounded_size_is_read(odd: tuple[Path, str]) -> None:
    path, part = odd
    with pytest.raises(ConfigError) as caught:
        read_shapes(path)
    assert part in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.problems[0].way_out


@pytest.mark.slow
def test_a_study_that_reads_a_named_file_refuses_what_is_none(
    odd: tuple[Path, str], refused: Callable[..., str]
) -> None:
    assert odd[1] in refused(*S, f"workload.shapes={odd[0]}")


def test_a_file_of_proc_that_never_ends_is_read_no_further_than_its_bound(elsewhere: Path) -> None:
    path = Path("/proc/self/maps")  # it says that it has no bytes
    assert path.stat().st_size == 0
    with pytest.raises(ConfigError, match="is larger than 10 bytes"):
        files.read_bytes(path, "data", most=10)


def test_nobody_waits_for_a_file_that_became_a_fifo(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = elsewhere / "a.csv"
    os.mkfifo(path)
    monkeypatch.setattr(files, "irregular", lambda path, most: "")
    with pytest.raises(ConfigError, match="a FIFO"):
        files.read_bytes(path, "data")


# Interpolations

CHAIN = "".join(f"a{n}: ${{study.a{n + 1}}}${{study.a{n + 1}}}\n" for n in range(60)) + "a60: x\n"
TREES = "".join(f"a{n}: {{x: '${{study.a{n + 1}}}', y: '${{study.a{n + 1}}}'}}\n" for n in range(60)) + "a60: {z: x}\n"
NEAR = CHAIN.replace("study.", ".")
BOMBS = {
    "texts that double": (CHAIN, "larger than"),
    "texts that double beside one another": (NEAR, "larger than"),
    "sections that double": (TREES, "larger than"),
    "names made of values": ("a: ${study.${study.b}}\nb: name\n", "by another interpolation"),
    "a function": ("a: ${oc.create:'[1,2]'}\n", "by a function"),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--cfg", "job", "--resolve"]], ids=["run", "cfg"])
@pytest.mark.parametrize("kind", BOMBS)
def test_what_interpolations_come_to_is_weighed_before_they_are_resolved(
    kind: str, flags: list[str], refused: Callable[..., str], elsewhere: Path
) -> None:
    (elsewhere / "conf" / "study").mkdir(parents=True)
    bomb, part = BOMBS[kind]
    (elsewhere / "conf" / "study" / "mine.yaml").write_text(f"# @package study\nname: mine\n{bomb}", encoding="utf-8")
    message = refused("study=mine", "--config-dir=conf", *flags)
    assert part in message
    assert "study.a" in message


@pytest.mark.slow
def test_interpolations_that_are_typed_are_weighed_as_well(refused: Callable[..., str]) -> None:
    bomb = [f"+study.a{n}=${{study.a{n + 1}}}${{study.a{n + 1}}}" for n in range(40)]
    assert "larger than" in refused(*S, *bomb, "+study.a40=x")


LEAVES = st.dictionaries(st.sampled_from("abcd"), st.text("xyz", max_size=9), min_size=1)


@pytest.mark.slow
@given(LEAVES, st.data())
def test_a_configuration_within_its_weight_is_no_larger_than_that(leaves: dict[str, str], data: st.DataObject) -> None:
    """References to earlier keys only, so that there are no circles."""
    from omegaconf import OmegaConf

    tree: dict[str, object] = {"s": dict(leaves)}
    for number in range(data.draw(st.integers(0, 5))):
        names = [*(f"s.{leaf}" for leaf in leaves), *(f"t{n}" for n in range(number))]
        text = "".join(f"${{{name}}}" for name in data.draw(st.lists(st.sampled_from(names), max_size=3)))
        tree[f"t{number}"] = f"<{text}>"
    expansion.check(tree)
    resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    weigher = expansion._Weigher(tree)
    assert isinstance(resolved, dict)
    for number in range(len(tree) - 1):
        assert len(resolved[f"t{number}"]) <= weigher.text((f"t{number}",), str(tree[f"t{number}"]))


def test_composing_ends_once_it_took_too_long() -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"configuration: takes longer than 0.05 s"), expansion.limit_cpu_time(0.05):
        while True:
            pass
    assert threading.active_count() == before


# Flags and files that Hydra answers with a traceback


@pytest.mark.parametrize(
    "flags",
    [["--resolve"], ["--multirun", "--resolve"], ["--package=study"], ["--cfg", "job", "--multirun"]],
    ids=" ".join,
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], refused: Callable[..., str]) -> None:
    assert flags[-1].partition("=")[0] in refused(*S, *flags)


@pytest.mark.parametrize("flags", [[], ["--cfg", "job"], ["--multirun"]], ids=["run", "cfg", "multirun"])
@pytest.mark.parametrize("text", ["3\n", "mi300x_8\n", "'a: b'\n"])
def test_a_file_of_one_value_is_no_configuration(
    text: str, flags: list[str], refused: Callable[..., str], elsewhere: Path
) -> None:
    (elsewhere / "conf" / "system").mkdir(parents=True)
    (elsewhere / "conf" / "system" / "mine.yaml").write_text(text, encoding="utf-8")
    message = refused(*S, "system=mine", "--config-dir=conf", *flags)
    assert "mine.yaml = " in message
    assert "holds one value and no keys (write it as key: value)" in message


def test_a_folder_of_very_many_files_is_not_searched_to_its_end(refused: Callable[..., str]) -> None:
    assert "holds more than" in refused(*S, "--config-dir=/proc")
