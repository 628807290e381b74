"""Configuration: whatever is wrong is refused by path before anything runs, and overrides mean what they say."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from dse import plugins
from dse.backend import Batch
from dse.cli import main
from dse.config.compose import Request, request
from dse.config.expansion import range_size, sweep_knob
from dse.config.options import list_options
from dse.errors import ConfigError
from dse.study.plan import Plan, plan
from dse.values import content_key, keys_to_hex
from simulators.workloads.operators import ShapeList, read_shapes
from tests import toy
from tests.support import (
    AFTER,
    CONF,
    DEVICES,
    FAMILIES,
    FREE,
    OF_ONE_GPU,
    SYSTEMS,
    flat_system,
    shipped,
)

Said = Callable[..., str]


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def refused(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run the command line, see that it refuses and leaves nothing behind; what it says."""

    def run(*words: str) -> str:
        before = sorted(elsewhere.iterdir())
        code = main(words)
        output = capsys.readouterr()
        assert code == 2, output.err
        assert "Traceback" not in output.err + output.out
        assert "refused, nothing was evaluated" in output.err
        assert sorted(elsewhere.iterdir()) == before
        return output.err

    return run


def test_a_sweep_inside_braces_needs_quotes() -> None:
    with pytest.raises(ConfigError, match=r"space\.schedule\.num_chunks.*inside braces it needs quotes"):
        plan(request(["study=ficco_sweep", "space={schedule: {num_chunks: choice(2,4)}}"]))


def test_a_mapping_is_merged_into_a_section() -> None:
    typed = [["system={node: {link_bytes_per_s: 6e10}}"], ["system.node.link_bytes_per_s=6e10"]]
    merged, single = (request(["study=ficco_sweep", *words]) for words in typed)
    assert (merged.tree, len(merged.problems)) == (single.tree, 0)
    assert request(["study=ficco_sweep", "system={nods: 2}"]).problems[0].path == "system.nods"


@functools.cache
def planned(*words: str, folder: Path | None = None) -> Plan:
    """The plan of a command line."""
    return plan(request(words, folder))


def base(planned_study: Plan) -> Any:
    """The base design of the first scenario."""
    return planned_study.backend.design(next(iter(planned_study.spaces.values())).base)


# Accidents on the command line. The serial schedule is composed fastest.

S = "schedule=serial"
CU = ["schedule=hetero_fused_1d", "schedule.comm_engine=cu"]
ACCIDENTS: list[tuple[list[str], list[str]]] = [
    # misspelt
    (["system.gpu.num_cuz=3"], ["system.gpu.num_cuz", "did you mean `system.gpu.num_cus=3`?"]),
    (["systm.gpu.num_cus=3"], ["systm.gpu.num_cus", "did you mean `system.gpu.num_cus=3`?"]),
    (["budget.trails=3"], ["budget.trails", "did you mean `budget.trials=3`?"]),
    (["sed=3"], ["sed", "did you mean `seed=3`?"]),
    (["schedule.granularty=4"], ["schedule.granularty"]),
    (["+executor.job=3"], ["executor.job", "did you mean `executor.jobs`?"]),
    (["simulator=evnt"], ["simulator = 'evnt'", "did you mean `simulator=event`?"]),
    (["study=fico_sweep"], ["study = 'fico_sweep'", "did you mean `study=ficco_sweep`?"]),
    (["schedule.name=shard_p2"], ["schedule", "'shard_p2'", "did you mean `schedule=shard_p2p`?"]),
    (["system=mi300x8"], ["system = 'mi300x8'", "did you mean `system=mi300x_8`?"]),
    (["~space.schedule.prioritty"], ["space.schedule.prioritty", "did you mean `'~space.schedule.priority'`?"]),
    (["study.objectives=[makespan]"], ["study.objectives = 'makespan'", "did you mean `makespan_s`?"]),
    (["study.hardware_objectives=[cost]"], ["study.hardware_objectives = 'cost'"]),
    (["study.module=fico"], ["fico", "did you mean `ficco`?"]),
    (["study.baseline={schedule.nmae:serial}"], ["study.baseline", "schedule.nmae"]),
    (["study.baseline={schedule.name:sreial}"], ["study.baseline", "sreial"]),
    (["workload.only=[g44]"], ["workload.only = 'g44'", "did you mean `g4`?"]),
    (["simulator.engine=evnt"], ["evnt", "did you mean `event`?"]),
    (["+simulator.engin=event"], ["simulator", "engin"]),
    (["+nosection.x=1"], ["nosection", "is not a known section"]),
    (["tracking=none", "tracking=mlflow"], ["tracking", "chosen more than once: none, then mlflow"]),
    (["store.retry=failed"], ["store.retry = 'failed'", "write `store.retry='[failed]'`"]),
    (["nosection.x=1"], ["nosection.x", "is not a known key"]),
    # quantities
    (["system.gpu.hbm_bytes_per_s=64 GHz"], ["system.gpu.hbm_bytes_per_s = '64 GHz'", "wrong dimension"]),
    (["system.gpu.hbm_bytes_per_s=64 GB"], ["system.gpu.hbm_bytes_per_s = '64 GB'", "wrong dimension"]),
    (["system.gpu.kernel_launch_s=2 parsec"], ["system.gpu.kernel_launch_s = '2 parsec'", "unknown unit"]),
    (["system.gpu.kernel_launch_s=-2 us"], ["system.gpu.kernel_launch_s = '-2 us'", "greater than or equal to 0"]),
    (["system.gpu.hbm_bytes_per_s=0 TB/s"], ["system.gpu.hbm_bytes_per_s = '0 TB/s'", "greater than"]),
    (["system.gpu.hbm_bytes=nan"], ["system.gpu.hbm_bytes = nan", "finite"]),
    (["system.gpu.hbm_bytes_per_s=inf"], ["system.gpu.hbm_bytes_per_s = inf", "finite"]),
    (["system.gpu.hbm_bytes=1e30"], ["system.gpu.hbm_bytes = 1e+30", "less than or equal to"]),
    (
        ["system.node.link_bytes_per_s=64"],
        ["system.node.link_bytes_per_s = 64", "write `system.node.link_bytes_per_s='64 GB/s'`"],
    ),
    # numbers
    (["system.gpu.num_cus=[64,128]"], ["give one value", "`+space.system.gpu.num_cus='choice(64,128)'"]),
    (["seed=[1,2]"], ["seed", "(give one value)"]),
    (["system.gpu.num_cus=010"], ["system.gpu.num_cus = '010'", "whole number"]),
    (["system.gpu.num_cus=on"], ["system.gpu.num_cus = 'on'", "whole number"]),
    (["system.gpu.num_cus=true"], ["system.gpu.num_cus = True", "whole number"]),
    (["system.gpu.num_cus=4:1"], ["system.gpu.num_cus = '4:1'", "whole number"]),
    (["system.gpu.num_cus=-4"], ["system.gpu.num_cus = -4", "greater than or equal to 1"]),
    (["system.gpu.num_cus=0"], ["system.gpu.num_cus = 0", "greater than or equal to 1"]),
    (["system.gpu.num_cus=nan"], ["system.gpu.num_cus = nan", "whole number"]),
    (["system.gpu.num_cus=1e30"], ["system.gpu.num_cus = 1e+30", "less than or equal to"]),
    (["system.gpu.num_cus="], ["system.gpu.num_cus = ''", "whole number"]),
    (["system.gpu.gemm.cache_miss=on"], ["system.gpu.gemm.cache_miss = 'on'", "number"]),
    (["system.gpu.gemm.cache_miss=1.01"], ["system.gpu.gemm.cache_miss = 1.01", "less than or equal to 1"]),
    (["system.cost_weights={}"], ["system.cost_weights"]),
    (["+system.cost_weights.gpu_count=1"], ["system.cost_weights"]),
    (["system.node.topology=torus"], ["system.node.topology = 'torus'", "'mesh'"]),
    (["seed=-1"], ["seed = -1"]),
    (["executor.jobs=0"], ["executor.jobs = 0"]),
    # sections that are not there, or hold no keys
    (["~system"], ["system"]),
    (["~schedule"], ["schedule"]),
    (["~simulator"], ["simulator: is missing"]),
    (["~system.gpu"], ["system.gpu: is missing"]),
    (["schedule=null"], ["schedule"]),
    (["workload.shapes=[]"], ["workload.shapes"]),
    (["workload.shapes=absent.csv"], ["workload.shapes = 'absent.csv'", "is no file"]),
    (["+system.gpu.num_cus.x=3"], ["system.gpu.num_cus"]),
    (["+simulator.colours={a:1}"], ["simulator", "colours"]),
    (["+simulator.colours=[a,b]"], ["simulator", "colours"]),
    # grammar
    (["system.gpu.num_cus"], ["system.gpu.num_cus: is no path=value"]),
    (["system.gpu.num_cus=[1"], ["system.gpu.num_cus=[1", "cannot be parsed"]),
    # infeasible
    ([*CU, "schedule.comm_cus=400"], ["schedule.comm_cus = 400", "leaves no CU", "(system.gpu.num_cus = 304)"]),
    # the space
    (["seed=9007199254740993"], ["seed = 9007199254740993", "beyond 2**53", "write a smaller number"]),
    (["+space.system.gpu.num_cus=choice(64,-9007199254740994)"], ["space.system.gpu.num_cus", "beyond 2**53"]),
    (["+space.system.gpu.num_cus=range(64,64)"], ["space.system.gpu.num_cus = 'range(64,64)'", "holds no value"]),
    (["+space.system.gpu.num_cus=range(304,64,8)"], ["space.system.gpu.num_cus", "holds no value"]),
    (["+space.system.gpu.hbm_bytes_per_s=interval(5,5)"], ["space.system.gpu.hbm_bytes_per_s", "not below"]),
    (["+space.system.gpu.hbm_bytes_per_s=tag(log,interval(0,5))"], ["space.system.gpu.hbm_bytes_per_s", "above 0"]),
    (["+space.system.gpu.hbm_bytes_per_s=choice(4 TB/s,5 THz)"], ["space.system.gpu.hbm_bytes_per_s = '5 THz'"]),
    (
        ["+space.system.gpu.num_cuz=choice(1,2)"],
        ["space.system.gpu.num_cuz", "did you mean `space.system.gpu.num_cus`?"],
    ),
    (["+space.system.gpu.num_cus=choice(0,-1,9999,64)"], ["num_cus = 0", "num_cus = -1", "num_cus = 9999"]),
    (["+space.system.gpu.num_cus=choice(on,64)"], ["space.system.gpu.num_cus = 'on'"]),
    (["+space.system.gpu.num_cus=interval(1.5,3.5)", "search=tpe"], ["space.system.gpu.num_cus = 1.5"]),
    (["+space.schedule.num_chunks=choice(2,4)"], ["space.schedule.num_chunks", "is no knob"]),
    (["space.schedule.comm_engine=choice(dma,cu,gpu)"], ["space.schedule.comm_engine = 'gpu'", "'cu' or 'dma'"]),
    (["system.gpu.num_cus=range(64,304,16)"], ["is given a sweep", "+space.system.gpu.num_cus='range(64,304,16)'"]),
    (["+space.search.name=choice(tpe,random)"], ["space.search.name", "is no knob"]),
    (["space=null"], ["space"]),
    (["budget.trials=5", "search=exhaustive"], ["search = 'exhaustive'", "budget.trials = 5"]),
    (["search=nsga2", "budget.trials=2", "+search.options={nonsense:1}"], ["search.options", "nonsense"]),
    (["search=nsga2", "budget.trials=2", "+search.batch=0"], ["search.batch = 0"]),
]


@pytest.mark.slow
@pytest.mark.one_in(10)
@pytest.mark.parametrize(("words", "parts"), ACCIDENTS, ids=" ".join)
def test_an_accident_is_refused_by_its_path_before_anything_runs(
    words: list[str], parts: list[str], refused: Said
) -> None:
    message = refused(*([] if words[0].startswith("schedule=") else [S]), "tracking=none", *words)
    for part in parts:
        assert part in message


@pytest.mark.slow
def test_a_misspelt_schedule_in_the_space_is_refused_with_the_nearest_one(refused: Said) -> None:
    message = refused("space.schedule.name=choice(serial,shard_p2)", "workload.only=[g4]")
    assert "space.schedule.name = 'shard_p2'" in message
    assert "did you mean `shard_p2p`?" in message


@pytest.mark.slow
def test_a_sweep_given_to_a_group_says_how_to_search_it(refused: Said) -> None:
    message = refused("schedule=serial,shard_p2p")
    way = re.search(r"write `\+?(space\.\S+)=(.*)`", message)
    assert way, message
    planned_study = planned(f"{way[1]}=choice({way[2]})")
    assert planned_study.knobs[0] == "schedule.name"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        {
            "system.gpu.num_cuz=3": "num_cuz",
            "simulator=evnt": "evnt",
            "+space.system.gpu.num_cus=range(5,5)": "range(5,5)",
        },
        {
            "seed=-1": "seed = -1",
            "budget.trials=on": "budget.trials",
            "system.gpu.hbm_bytes_per_s=64 GHz": "64 GHz",
            "system.node.topology=torus": "torus",
            "schedule.priority=urgent": "urgent",
            "workload.only=[g99]": "g99",
            "+space.system.gpu.dma.num_engines=choice(1,on)": "'on'",
            "study.objectives=[makespan]": "makespan",
        },
    ],
    ids=["words and files", "values"],
)
def test_problems_of_words_are_told_at_once_and_then_those_of_values(words: dict[str, str], refused: Said) -> None:
    """The second need all that evaluates, which a word that is wrong should not wait for."""
    message = refused(S, *words)
    assert [word for word, part in words.items() if part not in message] == []


def test_a_folder_that_is_not_there_is_refused(refused: Said) -> None:
    assert "--config-dir = 'absent'" in refused("--config-dir=absent", S)
    assert "--config-dir = 'absent'" in refused("--config-dir", "absent", S)


def test_a_flag_without_its_folder_is_refused(refused: Said) -> None:
    assert "--config-dir" in refused(S, "workload.only=[g4]", "tracking=none", "--config-dir")
    assert "--config-dir" in refused(S, "workload.only=[g4]", "tracking=none", "--config-dir=")


@pytest.mark.slow
def test_an_interpolation_on_the_command_line_is_never_taken_literally() -> None:
    try:
        planned_study = planned(S, "output_dir=${study.name}")
    except ConfigError as error:
        assert "output_dir" in str(error)
    else:
        assert planned_study.settings.output_dir == "ficco_sweep"


# Accidents in files

SYSTEM = flat_system()
CUS = "num_cus: 304"
FILES: dict[str, tuple[str, str]] = {
    "a leading zero": (SYSTEM.replace(CUS, "num_cus: 010", 1), "num_cus: 010"),
    "on for a number": (SYSTEM.replace(CUS, "num_cus: on", 1), "num_cus: on"),
    "base 60": (SYSTEM.replace(CUS, "num_cus: 4:1", 1), "num_cus: 4:1"),
    "base 60 in a key": (SYSTEM + "4:1: 3\n", "4:1: 3"),
    "an underscore in a number": (SYSTEM.replace(CUS, "num_cus: 3_04", 1), "num_cus: 3_04"),
    "a class to call": (SYSTEM + "_target_: os.system\n", "_target_"),
    "an alias": (SYSTEM.replace(CUS, "num_cus: &a 304", 1).replace("engines: 14", "engines: *a", 1), "engines: *a"),
    "a bracket left open": (SYSTEM + "more: [1\n", "more: [1"),
    "a tab": (SYSTEM + "\tmore: 1\n", "\tmore"),
    "a key given twice": (SYSTEM.replace(CUS, f"{CUS}\n  num_cus: 300", 1), "num_cus: 300"),
    "a Python object": (SYSTEM + "more: !!python/object/apply:os.getcwd []\n", "more: !!"),
}


def own(folder: Path, group: str, text: str | bytes) -> Path:
    """A folder with a configuration `mine` of a group."""
    (folder / group).mkdir(parents=True)
    (folder / group / "mine.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("accident", FILES)
def test_an_accident_in_a_file_is_refused_by_file_and_line(accident: str, tmp_path: Path, refused: Said) -> None:
    text, marker = FILES[accident]
    line = 1 + next(number for number, content in enumerate(text.splitlines()) if marker in content)
    message = refused(f"--config-dir={own(tmp_path / 'conf', 'system', text)}", S, "system=mine")
    assert re.search(rf"mine\.yaml(:{line}\b|.*\bline {line}\b)", message), message


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\x00",
        b"",
        b"- 1\n- 2\n",
        b"only words\n",
        b"3: 4\nname: mine\n",
        b"a: " + b"[" * 600 + b"]" * 600,
        b"a: \0",
    ],
    ids=["not UTF-8", "empty", "a list", "a text", "a number as key", "deeply nested", "a NUL"],
)
def test_a_file_that_is_no_configuration_is_refused(text: bytes, tmp_path: Path, refused: Said) -> None:
    folder = own(tmp_path / "conf", "system", text)
    assert re.search(r"mine\.yaml|system", refused(f"--config-dir={folder}", S, "system=mine"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "part"),
    [
        (CUS, "num_cuz: 304", "did you mean `system.gpu.num_cus`?"),
        ("4.3 TB/s", "4.3 THz", "system.gpu.hbm_bytes_per_s = '4.3 THz'"),
        ("4.3 TB/s", ".nan", "system.gpu.hbm_bytes_per_s = nan"),
        ("4.3 TB/s", "-.inf", "system.gpu.hbm_bytes_per_s = -inf"),
        (CUS, "num_cus: '304'", "system.gpu.num_cus = '304'"),
        (CUS, "num_cus: ${absent.key}", "absent.key"),
        ("name: mine", "defaults: [absent]\nname: mine", "system/absent"),
        ("    num_cus: {provenance: vendor", "    num_cu: {provenance: vendor", "gpu.num_cus"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused_like_one_on_the_command_line(
    before: str, after: str, part: str, tmp_path: Path, refused: Said
) -> None:
    assert before in SYSTEM
    folder = own(tmp_path / "conf", "system", SYSTEM.replace(before, after, 1))
    assert part in refused(f"--config-dir={folder}", S, "system=mine")


STUDY = (CONF / "study" / "ficco_sweep.yaml").read_text("utf-8").replace("name: ficco_sweep", "name: mine", 1)


@pytest.mark.slow
def test_a_misspelt_knob_in_the_space_of_ones_own_study_is_refused(tmp_path: Path, refused: Said) -> None:
    folder = own(tmp_path / "conf", "study", STUDY.replace("    num_chunks: choice", "    num_chunkz: choice", 1))
    assert "did you mean `space.schedule.num_chunks`?" in refused(
        f"--config-dir={folder}", "study=mine", "workload.only=[g4]", "tracking=none"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["chunky", None])
def test_a_schedule_of_an_unknown_family_is_refused(family: str | None, tmp_path: Path, refused: Said) -> None:
    text = f"name: mine\n{f'family: {family}' if family else ''}\nmover: cu\n"
    message = refused(f"--config-dir={own(tmp_path / 'conf', 'schedule', text)}", "schedule=mine")
    first = ", ".join(sorted(FAMILIES)[:5])  # of a long list the first ones
    assert f"known here: {first}, " in message or "did you mean `chunked`?" in message


# Accidents in a CSV


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no column m"),
        ("name,m,n,k\n", "no row"),
        ("name,m,n,k\na,0,8,8\n", "x.csv, line 2.m = "),
        ("name,m,n,k\na,8,8,8\nb,8,-8,8\n", "x.csv, line 3.n = "),
        ("name,m,n,k\na,1.5,8,8\n", "x.csv, line 2.m = "),
        ("name,m,n,k\na,010,8,8\n", "x.csv, line 2.m = '010'"),
        ("name,m,n,k\na,4:1,8,8\n", "x.csv, line 2.m = '4:1'"),
        ("name,m,n,k\na,²,8,8\n", "x.csv, line 2.m = '²'"),
        ("name,m,n,k\na,99999999999999999999,8,8\n", "x.csv, line 2.m = 99999999999999999999"),
        ("name,m,n\na,8,8\n", "x.csv, line 1: has no column k"),
        ("name;m;n;k\na;8;8;8\n", "separate columns by commas"),
        ("name,m,n,k,colour\na,8,8,8,red\n", "x.csv, line 2.colour: is not a known key"),
        ("name,m,n,k\na,8,8,8,8\n", "x.csv, line 2: has 5 cells for 4 columns"),
        ("name,m,n,k\na/b,8,8,8\n", "x.csv, line 2.name = 'a/b'"),
        ("name,m,n,k,pattern\na,8,8,8,all_to_none\n", "x.csv, line 2.pattern = 'all_to_none'"),
        ("name,m,n,k,note\na,8,8,8," + "x" * 140_000, "x.csv"),
    ],
    ids=lambda value: value[:40],
)
def test_a_bad_table_of_shapes_is_refused_by_file_and_row(text: str, part: str) -> None:
    Path("x.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_shapes(Path("x.csv"))
    assert part in str(caught.value)


@pytest.mark.slow
def test_a_bad_table_of_shapes_is_refused_on_the_command_line(refused: Said) -> None:
    Path("x.csv").write_text("name,m,n,k\na,8,8,8\na,8,0,8\n", encoding="utf-8")
    assert "x.csv, line 3.n" in refused(S, "workload.shapes=x.csv")
    Path("x.csv").write_text("name,m,n,k\na,8,8,8\na,8,8,8\n", encoding="utf-8")
    assert "names a shape twice" in refused(S, "workload.shapes=x.csv")
    Path("x.csv").write_bytes(b"\xff\xfe")
    assert "workload.shapes = 'x.csv'" in refused(S, "workload.shapes=x.csv")


# Mutation: any value of the shipped configuration replaced by a wrong one

MUTANTS: tuple[Any, ...] = (
    *(None, "nonsense", "", "010", "64 GHz", "${x}", True, False),
    *(-1, 0, 0.5, 1e30, 10**40, math.nan, math.inf, -math.inf),
    *([], [1], ["nonsense", None], {}, {"nonsense": 1}, {1: 2}),
)
SECTIONS = (
    *("system.gpu", "system.node", "system.cost_weights", "system.cost_reference", "system.sources", "system.name"),
    *("schedule", "workload", "study", "simulator", "search", "executor", "tracking", "seed", "output_dir", "budget"),
)


@functools.cache
def shipped_study() -> Request:
    """The shipped study on one of its shapes, as composed."""
    plan_request = request(["study=ficco_sweep", "workload.only=[g4]"])
    assert not plan_request.problems
    return plan_request


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all nodes, leaves and branches, but of long lists and tables only the first two entries."""
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    for name, value in items[:2] if len(items) > 12 and prefix else items:
        yield (*prefix, name)
        yield from paths(value, (*prefix, name))


def with_value(tree: dict[str, Any], path: Sequence[Any], value: Any) -> dict[str, Any]:
    """A copy of the tree with one node replaced."""
    root = copy.deepcopy(tree)
    node: Any = root
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = copy.deepcopy(value)
    return root


def without(tree: dict[str, Any], path: Sequence[Any]) -> dict[str, Any]:
    """A copy of the tree with one node left out."""
    root = copy.deepcopy(tree)
    node: Any = root
    for name in path[:-1]:
        node = node[name]
    del node[path[-1]]
    return root


def works(planned_study: Plan) -> None:
    """A plan that was accepted can be carried out: the study is there, base and baseline have results."""
    plugins.load("study", planned_study.settings.study.module)
    space = next(iter(planned_study.spaces.values()))
    baseline = space.tree(space.active(planned_study.settings.study.baseline))
    batches = [Batch(base(planned_study)), Batch(planned_study.backend.design(baseline))]
    point, other = toy.evaluate(planned_study.spec, batches)
    assert [result[0].reason for result in (point, other)] == ["", ""]
    assert [result[0].status for result in (point, other)] == ["ok", "ok"]
    related = planned_study.backend.relate(point.metrics, other.metrics)
    assert all(np.isfinite(value).all() for value in related.values())


def outcome(tree: dict[str, Any]) -> str:
    """What is wrong with how a mutated configuration is taken; '' if it is refused, or accepted and works."""
    try:
        planned_study = plan(replace(shipped_study(), tree=tree))
    except ConfigError as error:
        return "" if error.problems and all(problem.path for problem in error.problems) else "refused without a path"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        works(planned_study)
    except Exception as error:
        return f"accepted, but {type(error).__name__}: {str(error)[:200]}"
    return ""


@pytest.mark.slow
@pytest.mark.one_in(64)
@pytest.mark.parametrize(("section", "part"), list(itertools.product(SECTIONS, range(4))))
def test_any_value_replaced_by_a_wrong_one_is_refused_or_works(section: str, part: int) -> None:
    """Where nothing is slowed, so that the closed form has results when the engine behind it is taken away.

    part: of four, each with another quarter of the wrong values at every path.
    """
    tree, start = shipped_study().tree, tuple(section.split("."))
    for name, value in FREE.items():
        tree = with_value(tree, name.split("."), value)
    nodes = [path for path in paths(tree) if path[: len(start)] == start]
    assert nodes
    wrong: dict[str, str] = {}
    for place, path in enumerate(nodes):
        name = ".".join(map(str, path))
        mutants = MUTANTS[(place + part) % 4 :: 4]
        wrong |= {f"{name} = {mutant!r}": outcome(with_value(tree, path, mutant)) for mutant in mutants}
        if (place + part) % 4 == 0:
            wrong[f"~{name}"] = outcome(without(tree, path))
    assert {mutation: how for mutation, how in wrong.items() if how} == {}


@pytest.mark.slow
def test_the_shipped_study_works() -> None:
    works(plan(shipped_study()))


# Overrides


def named_once() -> Iterator[list[str]]:
    """Command lines that name every shipped option at least once.

    A schedule that runs a collective during the GEMM is named with a workload that has one, and the others with the
    other workloads; it has as many CUs as the system's kernels use. Groups that no default names are of studies that
    add them. An option that asks for a command or for a program is left out.
    """
    defaults = yaml.safe_load((CONF / "config.yaml").read_text("utf-8"))["defaults"]
    named = {group for line in defaults if isinstance(line, dict) for group in line}
    groups = {
        folder.name: [path.stem for path in sorted(folder.glob("*.yaml")) if path.stem != "external"]
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and folder.name in named
    }
    yield from ([f"study={name}"] for name in groups.pop("study"))
    # of steps, and of power, which study=power has
    groups["simulator"] = [name for name in groups["simulator"] if name not in ("step", "powered", "powered_step")]
    gpus = {name: shipped("system")[name]["gpu"] for name in SYSTEMS if name != "mi100"}
    groups["system"] = [
        name for name, gpu in gpus.items() if "persistent" not in gpu and "bf16" in gpu.get("peak_flop_per_s", ["bf16"])
    ]  # workloads have GEMMs in bf16
    groups_of_steps = ("model", "optimizer", "kernels", "lengths", "iterations")
    of_steps = {name: list(shipped(name)) for name in groups_of_steps} | {"system": DEVICES}
    for options in zip_longest(*of_steps.values()) if "bert" in list_options("study") else ():  # of a plug-in
        yield ["study=bert", *(f"{group}={option}" for group, option in zip(of_steps, options, strict=True) if option)]
    pairs = named_together(groups.pop("schedule"), groups.pop("workload"))
    for pair, *group_options in zip_longest(pairs, *groups.values()):
        words = [f"{group}={option}" for group, option in zip(groups, group_options, strict=True) if option]
        chosen = {word.partition("=")[0]: word.partition("=")[2] for word in (*words, *(pair or pairs[0]))}
        most = gpus.get(chosen.get("system", ""), {}).get("cu_copy", {}).get("num_cus")
        if most and (shipped("schedule")[chosen["schedule"]].get("comm_cus") or 0) > most:
            chosen["schedule.comm_cus"] = str(most)
        yield [f"{path}={value}" for path, value in chosen.items()]


IN_SWITCH = ["system=h100_8", "space.schedule.comm_engine=choice(cu)"]  # a schedule that few machines have


def named_together(schedules: Sequence[str], workloads: Sequence[str]) -> list[list[str]]:
    """Words that name each schedule and each workload, of which one shape, at least once."""
    written_out = [name for name in workloads if "workloads" in shipped("workload")[name]]
    queued = [name for name in workloads if "queues" in shipped("workload")[name]]
    apart_from = {*written_out, *queued}
    lists = {name: ShapeList.model_validate(shipped("workload")[name]) for name in workloads if name not in apart_from}
    first = {name: shapes.listed[0] for name, shapes in lists.items()}
    families = {name: shipped("schedule")[name]["family"] for name in schedules}
    fused = [f"schedule={name}" for name in schedules if families[name] in OF_ONE_GPU]
    pairs = [[schedule, f"workload={name}"] for schedule in fused for name in written_out]
    able = itertools.cycle(f"system={name}" for name in SYSTEMS if "persistent" in shipped("system")[name]["gpu"])
    words = [[*pair, system] for pair, system in zip(pairs, able, strict=False)]
    streams = [f"schedule={name}" for name in schedules if families[name] == "streams"]
    words += [[schedule, f"workload={name}", "system=mi100"] for schedule in streams for name in queued]
    schedules = [name for name in schedules if f"schedule={name}" not in (*fused, *streams)]
    by_kind: dict[str, tuple[list[str], list[str]]] = {}
    for name in schedules:
        kind = FAMILIES[shipped("schedule")[name]["family"]].orders[0]
        by_kind.setdefault(kind, ([], []))[0].append(name)
    for name, shape in first.items():
        after = (shape.pattern or lists[name].pattern) in AFTER
        by_kind["beside" if shape.payload_bytes else "after" if after else "before"][1].append(name)
    return words + [
        [
            f"schedule={schedule or names[0]}",
            f"workload={workload or of[0]}",
            f"workload.only=[{first[workload or of[0]].name}]",
            *(IN_SWITCH if str(schedule).endswith("in_switch") else ["system=t3_ring"] if kind == "after" else []),
        ]
        for kind, (names, of) in by_kind.items()
        for schedule, workload in zip_longest(names, of)
    ]


@pytest.mark.slow
@pytest.mark.one_in(25)
@pytest.mark.parametrize("words", list(named_once()), ids=" ".join)
def test_every_shipped_option_can_be_named_on_the_command_line(words: list[str]) -> None:
    planned_study = planned(*words)
    assert planned_study.spaces
    assert all(space.base for space in planned_study.spaces.values())


FEW = ("space.schedule.name=choice(serial,hetero_fused_1d)", "workload.only=[g4]")  # composes faster than all six


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value"), [("schedule.comm_engine", "cu"), ("schedule.num_chunks", 4), ("schedule.priority", "compute")]
)
def test_setting_a_searched_path_fixes_it_in_every_point_and_takes_it_out_of_the_space(path: str, value: Any) -> None:
    planned_study = planned(*FEW, f"{path}={value}")
    assert set(planned(*FEW).knobs) - set(planned_study.knobs) == {path}
    (space,) = planned_study.spaces.values()
    leaf = path.partition(".")[2]
    designs: list[Any] = [planned_study.backend.design(space.tree(point)) for point in space.points()]
    assert {design.schedule.name for design in designs} == {"serial", "hetero_fused_1d"}
    assert {getattr(design.schedule, leaf, None) for design in designs} - {None} == {value}


@pytest.mark.slow
def test_choosing_a_schedule_by_its_group_or_by_its_name_is_the_same() -> None:
    first, second = planned("schedule=shard_p2p"), planned("schedule.name=shard_p2p")
    assert first.request.tree == second.request.tree
    assert first.request.knobs == second.request.knobs
    assert [knob.path for knob in first.request.knobs] == [
        "schedule.comm_engine",
        "schedule.comm_cus",
        "schedule.priority",
    ]
    assert base(first).schedule.name == "shard_p2p"


@pytest.mark.slow
@pytest.mark.parametrize("plus", ["+", "", "++"])
def test_a_hardware_knob_joins_the_space_with_one_override_and_brings_its_objective(plus: str) -> None:
    planned_study = planned(S, f"{plus}space.system.gpu.num_cus=range(64,304,16)")
    knob = planned_study.request.knobs[-1]
    assert (knob.path, knob.values) == ("system.gpu.num_cus", tuple(range(64, 304, 16)))
    assert "cost_proxy" in planned_study.goals
    assert "cost_proxy" not in planned(S).goals
    (first, *_) = planned_study.spaces.values()
    assert first.size() == len(knob.values) * (planned(S).spaces["g1"].size() or 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("choice(64,128,304)", (64, 128, 304)),
        ("128,64", (128, 64)),
        ("[64,128]", (64, 128)),
        ("range(64,67)", (64, 65, 66)),
        ("interval(64,66)", (64, 65, 66)),
        ("128", (128,)),
        ("shuffle(range(1,4))", None),
    ],
)
def test_the_space_speaks_hydras_sweep_grammar(sweep: str, values: tuple[int, ...] | None) -> None:
    knob = planned(S, f"+space.system.gpu.num_cus={sweep}").request.knobs[-1]
    assert knob.values == values if values else sorted(knob.values) == [1, 2, 3]


@given(st.integers(-999, 999), st.integers(1, 99), st.integers(0, 60), st.integers(0, 98), st.sampled_from([1, -1]))
def test_a_range_has_the_decimals_that_were_written(start: int, step: int, count: int, over: int, sign: int) -> None:
    """The values of range(a, b, step) are a + i step in decimals, and b is left out, as it is of whole numbers."""
    stop = start + sign * (count * step + over % step)
    written = [f"{number / 100:.2f}" for number in (start, stop, sign * step)]
    sweep = OverridesParser.create().parse_override(f"k=range({','.join(written)})").value()
    right = [number / 100 for number in range(start, stop, sign * step)]
    if right:
        assert list(sweep_knob("k", sweep, {}).values) == right
    assert range_size(sweep) == len(right)


@pytest.mark.slow
def test_an_interval_is_searched_without_a_grid() -> None:
    planned_study = planned(S, "+space.system.gpu.hbm_bytes_per_s=tag(log,interval(1e12,8e12))", "search=tpe")
    knob = planned_study.request.knobs[-1]
    assert (knob.values, knob.low, knob.high, knob.log) == ((), 1e12, 8e12, True)


@pytest.mark.slow
def test_a_knob_can_be_deleted_from_the_space_and_put_back_with_other_values() -> None:
    assert "schedule.priority" not in planned(*FEW, "~space.schedule.priority").knobs
    knobs = planned(*FEW, "space.schedule.priority=choice(compute)").request.knobs
    assert {knob.path: knob.values for knob in knobs}["schedule.priority"] == ("compute",)


@pytest.mark.slow
def test_a_fixed_path_wins_over_a_sweep_of_the_study_and_contradicts_one_that_was_typed() -> None:
    planned_study = planned(S, "schedule.comm_engine=cu")
    assert "schedule.comm_engine" not in planned_study.knobs
    words = ["system.gpu.num_cus=128", "+space.system.gpu.num_cus=range(64,304)"]
    for typed in (words, words[::-1]):
        with pytest.raises(ConfigError, match="is swept here, and fixed by"):
            planned(S, *typed)


@pytest.mark.slow
@pytest.mark.parametrize("written", ["64 GB/s", "'64 GB/s'", "64e9", "512 Gbit/s", "64GB/s"])
def test_one_quantity_in_any_unit_is_one_design(written: str) -> None:
    path = "system.node.link_bytes_per_s"
    assert content_key(base(planned(S, f"{path}={written}"))) == content_key(base(planned(S, f"{path}=64000000000")))


@pytest.mark.slow
def test_a_claim_is_about_the_shipped_hardware_and_workload_only() -> None:
    unchanged = ["seed=3", "simulator=event", "system=mi300x_8", "space.schedule.comm_engine=choice(cu)"]
    assert planned(S, *unchanged).departures == []
    changed = ["system.gpu.num_cus=228", "+space.system.node.num_gpus=choice(4,8)", "workload.only=[g1]"]
    assert planned(S, *changed).departures == changed


@pytest.mark.slow
def test_ones_own_system_comes_from_a_folder(tmp_path: Path) -> None:
    text = SYSTEM.replace(CUS, "num_cus: 228", 1)
    planned_study = planned(S, "system=mine", folder=own(tmp_path / "conf", "system", text))
    assert base(planned_study).system.name == "mine"
    assert base(planned_study).system.gpu.num_cus == 228


@pytest.mark.slow
def test_ones_own_system_may_start_from_a_shipped_one(tmp_path: Path) -> None:
    text = "defaults: [mi300x_8, _self_]\nname: mine\ngpu:\n  dma:\n    num_engines: 7\n"
    planned_study = planned(S, "system=mine", folder=own(tmp_path / "conf", "system", text))
    assert base(planned_study).system.gpu.dma.num_engines == 7
    assert base(planned_study).system.gpu.num_cus == base(planned(S)).system.gpu.num_cus


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my conf, größe", "a=b,c", "it's [x]"])
def test_ones_own_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    folder = own(tmp_path / name, "system", SYSTEM)
    assert base(planned(S, "system=mine", folder=folder)).system.name == "mine"


@pytest.mark.slow
def test_ones_own_schedule_is_searched_like_a_shipped_one(tmp_path: Path) -> None:
    text = (CONF / "schedule" / "hetero_fused_1d.yaml").read_text("utf-8").replace("hetero_fused_1d", "mine", 1)
    folder = own(tmp_path / "conf", "schedule", text)
    planned_study = planned("space.schedule.name=choice(serial,mine)", "workload.only=[g4]", folder=folder)
    (space,) = planned_study.spaces.values()
    designs: list[Any] = [planned_study.backend.design(space.tree(point)) for point in space.points()]
    assert {design.schedule.name for design in designs} == {"serial", "mine"}


@pytest.mark.slow
def test_cfg_job_prints_the_composed_configuration() -> None:
    words = ["plan", "--cfg", "job", "model=qwen3_32b", "system.gpu.num_cus=100", "+space.run.batch=range(64,304,16)"]
    done = subprocess.run([sys.executable, "-m", "dse", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tree = yaml.safe_load(done.stdout)
    assert (tree["study"]["name"], tree["model"]["name"]) == ("plan", "qwen3_32b")  # an option that stands in a list
    assert tree["system"]["gpu"]["num_cus"] == 100
    assert tree["space"]["run"]["batch"] == "range(64,304,16)"
    assert not list(Path.cwd().iterdir())


@pytest.mark.slow
def test_grids_of_hardware_and_schedule_numbers_hold_the_designs_that_validation_gives() -> None:
    planned_study = planned(
        "workload.only=[g4]",
        "+space.system.gpu.num_cus=choice(200,304)",
        "+space.system.node.link_bytes_per_s=choice(64 GB/s,5e10)",
        "space.schedule.num_chunks=choice(8)",
    )
    space = next(iter(planned_study.spaces.values()))
    count = 0
    for block in space.blocks(1000):
        assert block.batch is not None
        assert {"system.gpu.num_cus", "system.node.link_bytes_per_s"} <= set(block.axes)
        keys = keys_to_hex(block.content_keys()).tolist()
        for place, design in enumerate(block.batch.designs()):
            point = {**block.assignment, **{path: block.values_at(path)[place].item() for path in block.axes}}
            expected = planned_study.backend.design(space.tree(point))
            assert design == expected
            assert keys[place].decode() == content_key(expected)
            count += 1
    assert count == space.size()


def test_formats_of_weights_are_typed_wherever_the_precision_of_a_run_is() -> None:
    runs = {name: tree["run"] for name, tree in shipped("study").items() if "precision" in (tree.get("run") or {})}
    assert len(runs) >= 3
    formats = {"weights", "kv_cache", "gradients", "optimizer_states"}
    assert {name for name, run in runs.items() if not formats <= set(run)} == set()
    typed = request(
        ["study=whole_models", "models=[llama3_8b]", "run.mode=prefill", "run.weights=fp8", "run.kv_cache=fp8"]
    )
    assert (typed.tree["run"]["weights"], typed.tree["run"]["kv_cache"]) == ("fp8", "fp8")
