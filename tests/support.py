"""Builders over the shipped configuration, and how Hypothesis runs. Import them: `from tests.support import design`."""

from __future__ import annotations

import ast
import copy
import functools
import gc
import importlib
import io
import math
import os
import pickle
import shutil
import subprocess
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import hydra
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from numba.core.event import install_timer
from numpy.typing import ArrayLike
from omegaconf import OmegaConf
from pydantic import BaseModel

from dse.backend import Backend, Batch, Result
from dse.config.variants import load_option
from dse.plugins import PACKAGES, available, configurations
from dse.space import get_path, set_path
from dse.tracking.database import open_store
from dse.values import leaves
from simulators.hardware.machine import tree_of
from simulators.hardware.network import Pattern
from simulators.hardware.parts import Contention
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.timeline import Engine, ForeignEngine
from tests.campaigns.postgres import Server, programs, running

REPOSITORY = Path(__file__).parents[1]
CONF = REPOSITORY / "conf"
SOURCES = [
    *(REPOSITORY / package for package in PACKAGES),
    *sorted(path for path in REPOSITORY.glob("plugins/*/dse_*") if path.is_dir()),
]
"""Folders of the packages, and of those of the plug-ins beside them."""
QUIET = ("tracking=none", "fidelity=none", "figures=none", "timeline=false")
"""Words of a study of which a test reads the table."""
SERIAL = ["study=ficco_sweep", "schedule=serial", "workload.only=[g4]", *QUIET]

# A loaded machine is slow, not wrong: no deadline. CI draws the same few examples in every run.
# Explaining a failure would run a simulation thousands of times more.
settings.register_profile(
    "local",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.register_profile("more", parent=settings.get_profile("local"), derandomize=True, max_examples=20)
settings.register_profile("ci", parent=settings.get_profile("more"), max_examples=10)
settings.load_profile("ci" if os.environ.get("CI") else "local")
if os.environ.get("CI"):
    # Constants of the modules that are loaded would be drawn too, and a worker loads others in every run.
    providers._get_local_constants = lambda: providers._local_constants


gc.set_threshold(50_000, 20, 20)  # importing test modules makes millions of objects, and hardly any garbage

_COMPOSE, _LOAD = hydra.compose, OmegaConf.load

UNMARKED_S = 8.0
"""CPU time, without what numba compiles, that a test may take that is not marked as slow.

Three seconds of a quiet machine, and what the first test pays for others that read the same file, on a busy one."""


def pytest_sessionstart() -> None:
    """Import in CI what takes seconds to import, or the test that happens to be first is charged with it."""
    for name in ("mlflow", "optuna", "sklearn.ensemble") if os.environ.get("CI") else ():
        importlib.import_module(name)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Run a test and note its CPU time, unless it is marked as slow."""
    began = time.process_time()
    with install_timer("numba:compile", lambda _: None) as compiling:
        result = yield
    taken = time.process_time() - began - (compiling.duration if compiling.done else 0.0)
    if pyfuncitem.get_closest_marker("slow") is None:
        pyfuncitem.user_properties.append(("cpu_s", taken))
    return result


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests that are slow and not marked so; times are no reason to fail, as machines differ."""
    for report in terminalreporter.stats.get("passed", ()):
        taken = dict(report.user_properties).get("cpu_s", 0.0)
        if taken > UNMARKED_S:
            terminalreporter.line(f"{report.nodeid} took {taken:.1f} s of CPU: mark it as slow, or let it do less")


def drawn(examples: int) -> settings:
    """How many examples a slow property draws; fewer where they are the same in every run: in CI at most 50."""
    most = settings().max_examples
    return settings(
        max_examples=max(1, min(examples * most // 40, 5 * most // 2)) if settings().derandomize else examples
    )


@functools.cache
def syntax() -> dict[Path, ast.Module]:
    """Syntax of every module of the packages and plug-ins, by its file."""
    files = sorted(path for package in SOURCES for path in package.rglob("*.py"))
    return {path: ast.parse(path.read_text("utf-8")) for path in files}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of a test that is marked `one_in` to `make more` or `make nightly`; what is left out is slow."""
    counts: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            every, *more = mark.args
            if counts[name] % every:
                item.add_marker("nightly" if not more or counts[name] % more[0] else "more")
            counts[name] += 1
        if any(map(item.get_closest_marker, ("more", "nightly"))):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests out of each search for garbage."""
    gc.freeze()


@functools.cache
def _loaded(text: str) -> bytes:
    return pickle.dumps(_LOAD(io.StringIO(text)))


@functools.cache
def _composed(name: str, overrides: tuple[str, ...]) -> bytes:
    return pickle.dumps(_COMPOSE(name, overrides=list(overrides)))


def _load_once(file: IO[str]) -> Any:
    """The tree of a shipped file, which stays as it is; of others it is read anew, as errors name them."""
    if not str(file.name).startswith(str(CONF)):
        return _LOAD(file)
    return pickle.loads(_loaded(file.read()))


def _compose_once(name: str, overrides: Sequence[str]) -> Any:
    """What Hydra composes of shipped files, which stay as they are; of others it is composed anew."""
    if any(word.startswith("hydra.searchpath=") for word in overrides):
        return _COMPOSE(name, overrides=list(overrides))
    return pickle.loads(_composed(name, tuple(overrides)))


@pytest.fixture(scope="session", autouse=True)
def composing() -> Iterator[None]:
    """Let Hydra read each shipped file and compose each choice of shipped options once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(_load_once))
        patch.setattr(hydra, "compose", _compose_once)
        yield


@functools.cache
def _trees(group: str) -> dict[str, Any]:
    # plug-ins' schedules conform as ours do, and some groups are all theirs
    folders = [CONF, *(configurations() if group == "schedule" or not (CONF / group).is_dir() else ())]
    files = [file for folder in folders for file in sorted((folder / group).glob("*.yaml"))]
    return {file.stem: tree_of(file.stem) if group == "system" else load_option(file) for file in files}


@functools.cache
def _pickled(group: str, option: str) -> bytes:
    return pickle.dumps(_trees(group)[option])  # copies several times as fast as `deepcopy`


def number(value: ArrayLike) -> float:
    """The number of one design, of a type that may also hold those of many."""
    return float(np.asarray(value))


class Copies(Mapping[str, Any]):
    """The trees of a configuration group by option name, each copied when it is first asked for."""

    def __init__(self, group: str) -> None:
        self._group, self._copied = group, dict[str, Any]()

    def __getitem__(self, option: str) -> Any:
        if option not in self._copied:
            self._copied[option] = pickle.loads(_pickled(self._group, option))
        return self._copied[option]

    def __iter__(self) -> Iterator[str]:
        return iter(_trees(self._group))

    def __len__(self) -> int:
        return len(_trees(self._group))


def shipped(group: str) -> Copies:
    """The trees of a configuration group, by option name, systems composed of their parts; yours to change."""
    return Copies(group)


def flat_system() -> str:
    """The text of a system that holds its GPU and its node itself."""
    parts = {"gpu": "mi300x", "node": "mi300x_mesh_8"}
    texts = {part: (CONF / part / f"{name}.yaml").read_text("utf-8") for part, name in parts.items()}
    own_text = (CONF / "system" / "mi300x_8.yaml").read_text("utf-8").partition("description:")[2]
    nested = "".join(f"{part}:\n{textwrap.indent(text, '  ')}" for part, text in texts.items())
    return f"name: mine\n{nested}description:{own_text}"


def sources_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted path -> source, of a system and of its parts; a change of an entry is one of the tree."""
    parts = {f"{part}.{path}": source for part in ("gpu", "node", "fabric")
             for path, source in ((tree.get(part) or {}).get("sources") or {}).items()}  # fmt: skip
    return {**parts, **tree.get("sources", {})}


def without_source(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """A tree of a system in which neither it nor a part names the source of a path."""
    part, _, below = path.partition(".")
    for sources, name in ((tree.get("sources") or {}, path), ((tree.get(part) or {}).get("sources", {}), below)):
        sources.pop(name, None)
    return tree


ENGINES: dict[str, Engine] = {
    name: engine for name, engine in available("engine").items() if not isinstance(engine, ForeignEngine)
}
EXACT = [name for name, engine in ENGINES.items() if engine.exact]
FAMILIES: dict[str, type[Any]] = available("schedule")
OF_STREAMS = ("streams",)  # families of GEMMs that share one GPU, and exchange nothing
OF_ONE_GPU = ("fused",)  # families that need a system that says what persistent kernels take
SCHEDULES = tuple(name for name, tree in _trees("schedule").items() if "comm_engine" in tree)
"""Those that kernels or DMA engines move; the others have tests of their own."""
DEVICES = tuple(name for name, tree in _trees("system").items() if "efficiency" in tree["gpu"])  # of single operators
SYSTEMS = tuple(name for name, tree in _trees("system").items() if "gemm" in tree["gpu"] and "cost_weights" in tree)
PATTERNS: tuple[Pattern, ...] = ("all_gather", "all_to_all")
"""Collectives that bring a GEMM its input."""
AFTER: tuple[Pattern, ...] = ("reduce_scatter", "all_reduce")
"""Collectives that sum what GEMMs have summed in parts."""
FREE: dict[str, Any] = {f"system.gpu.contention.{name}": 1.0 for name in Contention.model_fields}
FREE["system.gpu.contention.late_start"] = 0.0
# null: as the other one, or 0
for name in ("late_start_first", "fork_s", "wave_slack"):
    del FREE[f"system.gpu.contention.{name}"]
"""Overrides by which operators slow one another by nothing but the CUs, HBM and links they share."""


def merged(tree: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with the values of another one put over it, in place."""
    for name, value in extra.items():
        branch = tree.get(name)
        tree[name] = merged(branch, value) if isinstance(branch, dict) and isinstance(value, dict) else value
    return tree


@functools.cache
def backend(engine: str, fallback: str | None = None) -> OverlapBackend:
    """The overlap backend with one engine, and one for what that refuses."""
    return OverlapBackend(engine, fallback)


def design_tree(
    schedule: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    shape: tuple[int, int, int] = (4096, 8192, 2048),
    pattern: str = "all_gather",
) -> dict[str, Any]:
    """The tree of a shipped schedule on a shipped node with values set by dotted path. shape: (m, n, k).

    A schedule that runs a collective beside a GEMM has one of the size of A, of 64 KiB at least: a row for each of 64
    GPUs. One that runs nothing before a GEMM has an all-reduce after it, and the node what T3 adds, or a switch that
    adds. One of streams has three such GEMMs on one GPU.
    """
    m, n, k = shape
    knobs, system = shipped("schedule")[schedule], shipped("system")["mi300x_8"]
    entry: dict[str, Any] = {"name": "x", "m": m, "n": n, "k": k}
    orders = FAMILIES[knobs["family"]].orders
    if knobs["family"] in OF_STREAMS:
        system = shipped("system")["mi100"]
    elif orders == ("beside",):
        entry |= {"payload_bytes": max(1 << 16, 2 * m * k)}
    elif knobs["family"] == "in_switch":
        system, pattern = shipped("system")["h100_8"], "all_reduce"
    elif knobs["family"] == "gathered_in_switch":
        system = shipped("system")["h100_8"]
    elif orders == ("after",):
        pattern = pattern if pattern in AFTER else "all_reduce"
        merged(merged(system, shipped("pim")["hbm3_strawman"]), shipped("study")["t3_mi300x"]["system"])
    workload: dict[str, Any] = {"name": "test", "pattern": pattern, "shapes": [entry]}
    if knobs["family"] in OF_STREAMS:
        workload = {"name": "test", "queues": [{"name": "x", "gemms": [{"m": m, "n": n, "k": k, "copies": 3}]}]}
    tree = {
        "system": shipped("system")["mi210_4"] if knobs["family"] in OF_ONE_GPU else system,
        "schedule": knobs,
        "workload": workload,
    }
    root: dict[str, Any] = copy.deepcopy(dict(backend(next(iter(ENGINES))).scenarios(tree)["x"]))
    for path, value in (overrides or {}).items():
        set_path(root, path, value)
    return root


def design(schedule: str, overrides: Mapping[str, Any] | None = None, **workload: Any) -> OverlapDesign:
    """A validated design; arguments as for `design_tree`."""
    return backend(next(iter(ENGINES))).design(design_tree(schedule, overrides, **workload))


def smooth_numbers(point: BaseModel) -> list[str]:
    """Paths of the numbers of a design's system that may be any number near their value."""
    simulator = backend(next(iter(ENGINES)))
    return [
        path
        for path, value, _ in leaves(point)
        if path.startswith("system.") and isinstance(value, float) and value and math.isfinite(value)
        and get_path(point, path) == value and simulator.is_axis(path, point)
    ]  # fmt: skip


def results(simulator: Backend, designs: Iterable[BaseModel]) -> list[Result]:
    """One result per design, each a batch of its own."""
    return [result[0] for result in simulator.evaluate([Batch(point) for point in designs])]


def lower(point: OverlapDesign) -> TaskGraph:
    """The task graph of a design."""
    return point.schedule.lower(point.system, point.workload)


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """A file or folder of the material beside the repository; the test is skipped where it is absent."""

    def find(name: str) -> Path:
        path = REPOSITORY.parent / "shared" / name
        if not path.exists():
            pytest.skip(f"{path} is absent: the published values live beside the repository")
        return path

    return find


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which commands are given; what they read may lie around it."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def until(holds: Callable[[], bool], *, seconds: float) -> bool:
    """Wait for something to hold; whether it does."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow, to be copied; building one takes a second."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_store(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch, whose import takes seconds; tests of it are skipped where it is not installed."""
    return pytest.importorskip("torch", reason="torch is not installed: pip install torch")


def write_certificates(folder: Path) -> None:
    """Write certificates that Dask makes, as an authority of a user's would."""
    from distributed import Security

    security = Security.temporary()
    texts = (security.tls_ca_file, security.tls_scheduler_cert, security.tls_scheduler_key)
    folder.mkdir(mode=0o700)
    for name, text in zip(("ca.pem", "cert.pem", "key.pem"), texts, strict=True):
        (folder / name).write_text(text)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here: that takes root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server; tests of it are skipped where none is installed."""
    if programs() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # the server does not run as root
        with running(Path(name) / "server") as server:
            yield server


def damage(path: Path, data: st.DataObject, *, most: int) -> None:
    """Replace up to `most` bytes of a file."""
    content = bytearray(path.read_bytes())
    changes = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for place, byte in data.draw(st.lists(changes, min_size=1, max_size=most)):
        content[place] = byte
    path.write_bytes(content)
