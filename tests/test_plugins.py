"""Plug-ins: one module and one YAML, in the tree or from another distribution, and no edit elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

import dse
from dse import plugins
from dse.backend import Backend, Batch, Metric, Result, Results, Tree, complete
from dse.cli import main
from dse.config.compose import request
from dse.errors import ConfigError
from dse.evaluation.calls import BackendSpec
from dse.results import provenance
from dse.study.plan import plan
from dse.values import Frozen
from tests.support import CONF, ENGINES, REPOSITORY
from tests.toy import distribution, on_path


class Point(Frozen):
    """A design."""

    x: int
    name: str


ENGINE = '''
"""Everything one after another."""

import numpy as np

from simulators.taskgraph.timeline import Timeline


class OneByOne:
    """Every task alone, in order."""

    version = "1"
    batch = 64
    exact = False

    def run(self, graph):
        """Finish times are the running sum of what each task takes alone."""
        took = graph["delay"] + np.where(graph["work"] > 0, graph["work"] / graph.isolated_rate(), 0.0)
        finished = np.cumsum(took, axis=1)
        return Timeline(graph, finished - took, finished)

    def totals(self, graph):
        """Read off the timeline."""
        return self.run(graph).totals()


ENGINE = OneByOne()
'''
SCHEDULE = '''
"""Serial by another name."""

from typing import Literal

from search_spaces.serial import Serial


class Toy(Serial):
    """The whole collective, then the whole GEMM."""

    family: Literal["toy"]


SCHEDULE = Toy
'''
RUN = ["study=ficco_sweep", "workload.only=[g4]", "tracking=none", "fidelity=none", "figures=none", "simulator=toy"]
SPACE = ["space.schedule.name=choice(serial,toy)", "space.schedule.priority=choice(equal)"]


def conf(folder: Path) -> Path:
    """A folder with the YAML of the toy engine and of the toy schedule."""
    for group, text in {
        "simulator": "name: toy\ndescription: tasks one by one\nbackend: overlap\nengine: toy\nfallback: null\n",
        "schedule": "name: toy\ndescription: a toy to add\nfamily: toy\ncomm_engine: dma\npriority: equal\n",
    }.items():
        (folder / group).mkdir(parents=True)
        (folder / group / "toy.yaml").write_text(text, encoding="utf-8")
    return folder


def write(folder: Path, **modules: str) -> Path:
    """Modules of these names in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["in the tree", "as a distribution"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Runs the command line in a process in which the toys are there, in either way."""
    if request.param == "in the tree":
        write(tmp_path / "simulators.engines", toy=ENGINE)
        write(tmp_path / "search_spaces", toy=SCHEDULE)
        lines = [
            f"import {name}; {name}.__path__.append({str(tmp_path / name)!r})"
            for name in ("simulators.engines", "search_spaces")
        ]
        command = ["-c", "\n".join([*lines, "import sys; from dse.cli import main; sys.exit(main())"])]
        environment = dict(os.environ)
    else:
        site = write(tmp_path / "site", some_engine=ENGINE, some_schedule=SCHEDULE)
        distribution(site, "toybox", simulators="toy = some_engine", search_spaces="toy = some_schedule")
        command = ["-m", "dse"]
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
    folder = conf(tmp_path / "conf")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, *command, *words, f"--config-dir={folder}"]
        return subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    return run


@pytest.mark.more
@pytest.mark.one_in(2)
def test_an_engine_and_a_schedule_take_one_module_and_one_yaml_each(start: Start, tmp_path: Path) -> None:
    done = start(*RUN, *SPACE)
    assert done.returncode == 0, done.stderr
    table = dse.load("ficco_sweep", tmp_path / "outputs")
    assert set(table["schedule.name"]) == {"serial", "toy"}
    assert set(table["engine"]) == {"toy"}
    assert set(table["status"]) == {"ok"}
    help_text = start("schedules").stdout + start("simulators").stdout
    assert "a toy to add" in help_text
    assert "tasks one by one" in help_text


def _blocks(page: str) -> dict[str, str]:
    """Code blocks of a page of the documentation, by the file that their first line names."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+/\S+)\n(.*?)```", page, re.S)
    return dict(blocks)


def _write_documented(folder: Path) -> None:
    """Write the modules and YAML files of the page on extending, as they stand there."""
    for name, text in _blocks((REPOSITORY / "docs" / "how-to" / "extend.md").read_text("utf-8")).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _run_with(folder: Path, packages: Sequence[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a study with the modules of a folder in our packages, and its configuration."""
    code = "".join(f"import {name}; {name}.__path__.append({str(folder / name)!r})\n" for name in packages)
    code += "import sys; from dse.cli import main; sys.exit(main())"
    line = [sys.executable, "-c", code, *words, "tracking=none", "--config-dir=conf"]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.more
@pytest.mark.slow
def test_the_schedule_and_the_study_of_the_documentation_run_as_written(tmp_path: Path) -> None:
    _write_documented(tmp_path)
    run = partial(_run_with, tmp_path, ["search_spaces", "studies"], "study=halves_share", "figures=none")
    tiny = "workload.shapes=[{name: tiny, m: 8, n: 4096, k: 4096}, {name: fair, m: 4096, n: 4096, k: 4096}]"
    done = run(tiny)
    assert done.returncode == 0, done.stderr
    table = dse.load("halves_share", tmp_path / "outputs").sort_values("schedule.first_share")
    table = table[table["schedule.name"] == "halves"]
    assert set(table["scenario"]) == {"tiny", "fair"}
    fair = table[table["scenario"] == "fair"]
    assert (fair["status"] == "ok").all()
    assert list(fair["schedule.first_share"]) == [0.3, 0.5, 0.7]
    assert fair["makespan_s"].nunique() == 3
    assert set(table.loc[table["scenario"] == "tiny", "reason"]) == {
        "workload.operators.gather.rows = 8: leaves a part of a shard without rows"
    }
    assert "not tested" in done.stdout  # the claim is about other GEMMs

    study = tmp_path / "studies" / "halves_share.py"
    study.write_text(study.read_text("utf-8").replace('"halves.gain"', '"halves.gian"'), encoding="utf-8")
    message = "finding halves.gian has no claim of this id (did you mean `halves.gain`?)"
    assert message in run().stderr

    file = tmp_path / "search_spaces" / "halves.py"
    file.write_text(file.read_text("utf-8").replace("np.rint(", "np.absent("), encoding="utf-8")
    done = run("+space.schedule.priority='choice(equal,communication)'")
    assert done.returncode == 3
    assert "schedule halves fails in lower: AttributeError" in done.stderr
    assert "(search_spaces.halves, line 35)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.more
def test_a_backend_of_four_members_touches_nothing_outside_its_package_and_its_yaml(tmp_path: Path) -> None:
    _write_documented(tmp_path)
    done = _run_with(tmp_path, ["simulators"], "study=kernels", "executor.jobs=2")
    assert done.returncode == 0, done.stderr
    table = dse.load("kernels", tmp_path / "outputs").sort_values("machine.flop_per_s")
    assert list(table["time_s"]) == [2e-3, 1e-3, 1e-3]
    assert set(table["scenario"]) == {"base"}


def test_what_a_backend_may_offer_has_a_default() -> None:
    class Least:
        version = "1"
        metrics: ClassVar = {"time_s": Metric("s", "how long")}

        def design(self, tree: Tree) -> Point:
            return Point(**tree["point"])

        def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
            return [Results.of([Result("ok", {"time_s": 1.0})] * batch.size) for batch in batches]

    backend = complete(Least)()
    assert isinstance(backend, (Least, Backend))
    tree = {"point": {"x": 1, "name": "p"}}
    design = backend.design(tree)
    backend.sections(tree)
    assert backend.scenarios(tree) == {"base": tree}
    assert [backend.condition(f"point.{name}", tree) for name in ("x", "name", "y")] == [{}, None, None]
    assert not backend.is_axis("point.x", design)
    assert backend.screen([Batch(design)])[0].ok.all()
    assert (backend.problems(design), backend.facts(design), backend.relations) == ([], [], {})
    assert backend.relate({}, {}) == {}
    assert backend.replay(design).intervals == ()
    assert (backend.batch, backend.version) == (1, "1")


# In this process


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    conf(tmp_path / "conf")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import absent_library", "absent_library"),
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_plug_in_that_cannot_be_imported_is_refused_by_the_name_of_its_distribution(
    text: str, part: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = write(elsewhere / "site", broken_engine=text)
    distribution(site, "toybox", simulators="toy = broken_engine")
    with on_path(site):
        assert main([*RUN, "schedule=serial", "--config-dir=conf"]) == 2
        message = capsys.readouterr().err
    assert "toybox" in message
    assert "broken_engine" in message
    assert part in message
    assert "Traceback" not in message
    assert not (elsewhere / "outputs").exists()


@pytest.mark.slow
def test_a_plug_in_whose_module_is_not_there_is_refused_by_the_name_of_its_distribution(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution(elsewhere / "site", "toybox", simulators="toy = not_there")
    with on_path(elsewhere / "site"):
        assert main([*RUN, "schedule=serial", "--config-dir=conf"]) == 2
    assert "toybox" in capsys.readouterr().err


@pytest.mark.slow
def test_a_module_without_the_plug_in_is_refused_with_those_that_have_one(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = write(elsewhere / "site", empty_engine="")
    distribution(site, "toybox", simulators="toy = empty_engine")
    with on_path(site):
        assert main([*RUN, "schedule=serial", "--config-dir=conf"]) == 2
    message = capsys.readouterr().err
    assert "simulator.engine = 'toy': is in empty_engine, which has no ENGINE (define it there; " in message
    assert "analytic, " in message and "event, " in message


@pytest.mark.slow
def test_a_broken_plug_in_that_nobody_asked_for_stops_no_study(elsewhere: Path) -> None:
    site = write(elsewhere / "site", broken_engine="1 / 0")
    distribution(site, "toybox", simulators="broken = broken_engine")
    with on_path(site):
        assert plan(request(["schedule=serial"])).spaces


@pytest.mark.slow
def test_two_plug_ins_of_one_name_are_refused_naming_both(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = write(elsewhere / "site", one_engine=ENGINE, other_engine=ENGINE)
    distribution(site, "toybox", simulators="toy = one_engine")
    distribution(site, "lookalike", simulators="toy = other_engine")
    with on_path(site):
        assert main([*RUN, "schedule=serial", "--config-dir=conf"]) == 2
    message = capsys.readouterr().err
    assert "toybox" in message
    assert "lookalike" in message


@pytest.mark.slow
def test_a_plug_in_may_not_take_the_name_of_a_shipped_one(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = write(elsewhere / "site", my_engine=ENGINE)
    distribution(site, "toybox", simulators="event = my_engine")
    with on_path(site):
        assert main([*RUN[:-1], "schedule=serial", "simulator=event"]) == 2
    message = capsys.readouterr().err
    assert "simulators.engines.event" in message
    assert "toybox" in message


def test_a_plug_in_is_seen_after_a_refresh_and_gone_after_it_left(elsewhere: Path) -> None:
    site = write(elsewhere / "site", my_engine=ENGINE)
    distribution(site, "toybox", simulators="toy = my_engine")
    assert "toy" not in plugins.names("engine")
    with on_path(site):
        assert "toy" in plugins.names("engine")
        assert set(plugins.available("engine")) >= {"toy", *ENGINES}
        assert plugins.load("engine", "toy").batch == 64
    assert "toy" not in plugins.names("engine")
    with pytest.raises(ConfigError, match="is no plug-in with ENGINE"):
        plugins.load("engine", "toy")


def test_a_plug_in_that_was_replaced_is_used_in_its_new_form_after_a_refresh(elsewhere: Path) -> None:
    versions = []
    for version in ("1", "2"):
        site = write(elsewhere / version, new_engine=ENGINE.replace('version = "1"', f'version = "{version}"'))
        distribution(site, "toybox", simulators="renewed = new_engine")
        with on_path(site):
            versions.append(BackendSpec("overlap", (("engine", "renewed"),)).make().version)
    assert versions[0] != versions[1]


OVERHEATED = "        raise ValueError('overheated')\n"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["engine", "schedule"])
def test_a_plug_in_that_fails_on_every_design_is_told_point_by_point(
    module: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = f"\n    def lower(self, system, workload):\n{OVERHEATED}\n\nSCHEDULE"
    texts = {
        "my_engine": ENGINE.replace("        took =", f"{OVERHEATED}        took =") if module == "engine" else ENGINE,
        "my_schedule": SCHEDULE.replace("\n\nSCHEDULE", hot) if module == "schedule" else SCHEDULE,
    }
    site = write(elsewhere / "site", **texts)
    distribution(site, "toybox", simulators=f"hot_{module} = my_engine", search_spaces="toy = my_schedule")
    with on_path(site):
        assert main([*RUN, *SPACE, f"simulator.engine=hot_{module}", "--config-dir=conf"]) == 3
    assert "Traceback" not in capsys.readouterr().err
    table = dse.load("ficco_sweep")
    failed = table if module == "engine" else table[table["schedule.name"] == "toy"]
    assert len(failed)
    assert set(failed["status"]) == {"failed"}
    (reason,) = set(failed["reason"])
    where = "my_engine, line " if module == "engine" else "schedule toy fails in lower: "
    assert "ValueError: overheated (" in reason and where in reason
    assert set(table["status"]) == ({"failed"} if module == "engine" else {"failed", "ok"})


STUDY = '''
"""A study without claims or figures."""


class Toys:
    """Asks nothing of a paper."""

    allows = ()

    def claims(self):
        """None."""
        return []

    def findings(self, table):
        """None."""
        return {}

    def figures(self, table, timelines):
        """None."""
        return iter(())


STUDY = Toys()
'''
TOYS = """\
# @package _global_
defaults:
  - override /system: null
  - override /workload: null
  - override /schedule: null
  - override /simulator: box

study:
  name: toys
  question: which toy is best?
  module: toys
  objectives: [time_s, gain]
  baseline: {thing.x: 0}
  summary: [thing.x, thing.mode]

thing: {name: plain, x: 1, y: 0.0, mode: flat, bend: loose, grip: 0}
tool: {size: 1, weight: 0.5}

space:
  thing:
    x: range(0,6)
    mode: choice(flat,bent)
    bend: choice(firm,loose)
"""


@pytest.mark.more
def test_a_backend_that_knows_no_gpu_is_explored_like_any_other(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = write(elsewhere / "site", toy_study=STUDY)
    distribution(site, "toybox", simulators="toy = tests.toy", studies="toys = toy_study")
    (elsewhere / "conf" / "study").mkdir()
    (elsewhere / "conf" / "study" / "toys.yaml").write_text(TOYS, encoding="utf-8")
    (elsewhere / "conf" / "simulator" / "box.yaml").write_text("name: box\nbackend: toy\n", encoding="utf-8")
    with on_path(site):
        assert main(["study=toys", "tracking=none", "--config-dir=conf"]) == 0, capsys.readouterr().err
    table = dse.load("toys")
    assert len(table) == 2 * 6 * 3
    assert "x faster" in capsys.readouterr().out


METHOD = '''
"""The first points that there are."""


class First:
    def __init__(self, question, options):
        self._left = question.space.points()

    def ask(self, count):
        return [point for point, _ in zip(self._left, range(count))]

    def tell(self, points, outcomes):
        pass


METHOD = First
'''


@pytest.mark.slow
def test_a_search_method_joins_as_a_module_and_a_yaml_of_another_distribution(elsewhere: Path) -> None:
    site = write(elsewhere / "site", some_method=METHOD)
    distribution(site, "toybox", **{"search.methods": "first = some_method"})
    (elsewhere / "conf" / "search").mkdir()
    (elsewhere / "conf" / "search" / "first.yaml").write_text("name: first\ndescription: in order\n", encoding="utf-8")
    with on_path(site):
        words = [
            "study=ficco_sweep",
            "workload.only=[g4]",
            "tracking=none",
            "timeline=false",
            "figures=none",
            "schedule=serial",
        ]
        assert main([*words, "search=first", "budget.trials=2", "--config-dir=conf"]) == 0
    table = dse.load("ficco_sweep")
    assert sorted(table["schedule.comm_engine"]) == ["cu", "dma"]  # all that a serial schedule can differ in


EVALUATOR = '''
"""Points evaluated here, by settings of its own."""

from contextlib import contextmanager

from dse.evaluation.evaluators import EvaluatorKind, evaluate_here
from dse.evaluation.evaluators import ExecutorSettings


class Loud(ExecutorSettings):
    """An executor that says a word."""

    word: str


@contextmanager
def opened():
    def make(spec, executor, services):
        print(executor.word, spec.name)
        return evaluate_here(spec, executor, services)

    print("opened")
    yield make
    print("closed")


EVALUATOR = EvaluatorKind(Loud, opened)
'''


@pytest.mark.slow
def test_an_evaluator_joins_with_settings_of_its_own_and_lasts_as_long_as_the_study(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = write(elsewhere / "site", loud_evaluator=EVALUATOR)
    distribution(site, "toybox", evaluators="loud = loud_evaluator")
    (elsewhere / "conf" / "executor").mkdir()
    text = "name: loud\ndescription: says a word\nevaluator: loud\nword: hello\njobs: 1\n"
    (elsewhere / "conf" / "executor" / "loud.yaml").write_text(text, encoding="utf-8")
    words = ["study=ficco_sweep", "workload.only=[g4]", "tracking=none", "figures=none", "schedule=serial"]
    words += ["executor=loud", "--config-dir=conf"]
    with on_path(site):
        assert main([*words, "simulator=fluid"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "opened"
        assert lines.count("opened") == lines.count("closed") == 1  # the levels of the ladder share it
        assert lines.count("hello overlap") > 1
        assert main([*words, "executor.word=[1]"]) == 2
        assert "executor.word" in capsys.readouterr().err
    assert main(words) == 2
    assert "executor.evaluator = 'loud': is no plug-in with EVALUATOR" in capsys.readouterr().err


_ALONE = """
import importlib.metadata as metadata, sys
metadata.entry_points = lambda **group: metadata.EntryPoints(())  # as where no other distribution is installed
from dse import plugins
from dse.cli import main
code = main(sys.argv[1:])
offered = [name for name in sys.modules if name.partition(".")[0].startswith("dse_")]
assert not offered and plugins.roots() == plugins.PACKAGES, offered
sys.exit(code)
"""


@pytest.mark.more
def test_the_core_runs_its_main_job_without_any_other_distribution(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", _ALONE, *words]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    done = run("study=ficco_sweep", "workload.only=[g4]", "schedule=serial", "tracking=none", "fidelity=none")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "ficco_sweep" / "latest"
    assert (folder / "results.parquet").is_file()
    assert {path.suffix for path in (folder / "figures").iterdir()} == {".png", ".svg", ".json"}
    done = run("results", "report", "study=ficco_sweep")
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("*.html"))
    refusal = run("results", "compare", "ficco_sweep", "ficco_sweep", "--html")
    assert refusal.returncode == 2
    assert "html: needs pages, which are not installed (pip install overlap-dse-pages)" in refusal.stderr


@pytest.mark.more
def test_a_package_of_another_distribution_brings_what_it_declares_and_its_configuration(tmp_path: Path) -> None:
    site = write(tmp_path / "site" / "toyshop", __init__='GROUPS = {"toy": "Toys"}\n').parent
    distribution(site, "toyshop", packages="toys = toyshop")
    options = {"toy/ball": "name: ball\ndescription: it rolls\n"}
    serial = (CONF / "schedule" / "serial.yaml").read_text("utf-8")
    options["schedule/bare"] = serial.replace("name: serial", "name: bare")
    for name, text in options.items():
        file = site / "toyshop" / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))

    def run(*words: str) -> str:
        line = [sys.executable, "-m", "dse", *words]
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    assert "it rolls" in run("toys")
    study = ("study=ficco_sweep", "workload.only=[g4]", "schedule=bare", "tracking=none", "fidelity=none")
    assert "name: bare" in run(*study, "--cfg", "job")  # as Hydra composes it
    assert "g4" in run("--dry-run", *study)


def test_an_option_that_two_folders_have_is_refused(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hydra would take the shipped one and say nothing of the other."""
    folder = elsewhere / "my_conf" / "schedule"
    folder.mkdir(parents=True)
    (folder / "serial.yaml").write_text((CONF / "schedule" / "serial.yaml").read_text("utf-8"), encoding="utf-8")
    assert main(["--dry-run", "study=ficco_sweep", "schedule=serial", "--config-dir=my_conf"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "schedule = 'serial': is in 2 folders of configuration" in message
    assert "rename one of them, and its `name`" in message


@pytest.mark.parametrize("package", ["absent_toys", "absent.toys", "os.path"])
def test_a_package_that_is_offered_and_is_none_breaks_nothing(elsewhere: Path, package: str) -> None:
    distribution(elsewhere / "site", "toyshop", packages=f"toys = {package}")
    with on_path(elsewhere / "site"):
        assert package in plugins.roots()
        assert plugins.places(package) == ()
        assert not any(package in str(folder) for folder in plugins.configurations())
        assert provenance.code_hashes.__wrapped__()[package]
        assert plugins.load("backend", "overlap")
