"""What every engine and every schedule must do. Both are found by looking: a new one is tested with no edit here."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import Backend, Batch, Results, check_results
from dse.config.compose import request
from dse.errors import ConfigError
from dse.plugins import available
from dse.testing import check_backend
from dse.values import put
from simulators.costs.gemm import GemmShape, WaveGemms, gemm_cost
from simulators.engines.event import fair_rates
from simulators.hardware.machine import tree_of
from simulators.hardware.network import links
from simulators.overlap.design import OverlapDesign
from simulators.overlap.metrics import METRICS, RELATIONS
from simulators.overlap.powered import PoweredBackend
from simulators.steps.powered import PoweredStepBackend
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.symmetry import patterns, reduce_graph
from simulators.taskgraph.timeline import Timeline
from tests import iterations, test_external, test_functions, toy
from tests.graphs import AMOUNTS, Plan, assert_equal_totals, graphs, grids, pipelines
from tests.passes import research_folders
from tests.support import (
    ENGINES,
    EXACT,
    FAMILIES,
    FREE,
    OF_STREAMS,
    PATTERNS,
    SCHEDULES,
    backend,
    design,
    design_tree,
    drawn,
    lower,
    number,
    results,
    shipped,
)

Floats = NDArray[np.float64]
Point = dict[str, Any]  # arguments of support.design

PAIRS = list(itertools.combinations(EXACT, 2))
BOUNDS = [name for name in ENGINES if name not in EXACT]  # from below
UNIFORM_FUSED = [
    name
    for name, tree in shipped("schedule").items()
    if (tree.get("local_shard_first"), tree.get("compute")) == (False, "fused")
]

DRAWN = ("comm_engine", "comm_cus", "priority", "num_chunks", "withheld_cus")


def _distinct() -> list[str]:
    """Shipped schedules, but only one of those that differ in nothing but what `knobs` draws."""
    distinct: dict[str, str] = {}
    for name in SCHEDULES:
        tree = shipped("schedule")[name]
        content = {key: value for key, value in tree.items() if key not in {*DRAWN, "name", "description"}}
        distinct.setdefault(str(sorted(content.items())), name)
    return list(distinct.values())


DISTINCT = _distinct()

every_engine = pytest.mark.parametrize("engine", ENGINES)
every_exact_engine = pytest.mark.parametrize("engine", EXACT)
every_bound = pytest.mark.parametrize("engine", BOUNDS)
every_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)


# What is known of designs before they are run


def a_grid_of_overlap() -> tuple[Backend, list[Batch]]:
    """Some of its designs leave no CU for compute, others do not fit into memory."""
    axes = {"schedule.comm_cus": np.array([8, 304, 48]), "system.gpu.hbm_bytes": np.array([192e9, 1e9])}
    point = design("uniform_fused_1d", {"schedule.comm_engine": "cu"})
    return backend("analytic", "fluid"), [Batch(Batch(point, axes).at(0), axes), Batch(design("serial"))]


def overlap_under_a_limit() -> tuple[Backend, list[Batch]]:
    """Limits that bind, that do not, and that no clock keeps."""
    simulator = PoweredBackend("fluid")
    tree = {**design_tree("c3_base"), "system": shipped("system")["a100_8"]}
    axes = {"system.gpu.power.cap_w": np.array([400.0, 250.0, 60.0]), "system.gpu.clock": np.array([1.0, 0.7])}
    return simulator, [Batch(Batch(simulator.design(tree), axes).at(0), axes)]


def programs_given_a_design_each() -> tuple[Backend, list[Batch]]:
    """The menu answers 1.0 to whatever it is asked."""
    program = BACKENDS["external"](**test_external.parameters())
    return program, [Batch(program.design(test_external.tree(x=x))) for x in (1.0, 2.0)]


def calls_of_a_function() -> tuple[Backend, list[Batch]]:
    """The function of a module, which is called with each design."""
    simulator = test_functions.backend(Path(__file__).parents[1], "tests.test_functions:bowl")
    return simulator, [Batch(simulator.design({"arguments": {"x": x}})) for x in (1.0, 2.0)]


def things() -> tuple[Backend, list[Batch]]:
    """Those from 900 are too large."""
    return toy.Fixed(), [toy.grid([1, 899, 900, 901]), toy.grid([3]), toy.grid([905, 950])]


def things_on_arrays() -> tuple[Backend, list[Batch]]:
    """The same, vectorised."""
    return toy.Vectors(), things()[1]


def searches() -> tuple[Backend, list[Batch]]:
    """Of two methods on one known space."""
    simulator = BACKENDS["landscape"](shares=[0.1, 0.5])
    command = ["study=ficco_sweep", "workload.only=[g4]", "study.objectives=[makespan_s,comm_cu_s]"]
    trees = [{"landscape": {"command": command}, "run": {"method": name}} for name in ("random", "auto")]
    return simulator, [Batch(simulator.design(tree)) for tree in trees]


BACKENDS = available("backend")


def predictions() -> tuple[Backend, list[Batch]]:
    """Of one device by three models."""
    simulator = BACKENDS["measured"]()
    (base, *_) = simulator.scenarios({"devices": ["p100"], "predict": {"model": "fitted"}}).values()
    models = ("fitted", "roofline", "nearest")
    return simulator, [Batch(simulator.design({**base, "predict": {"model": model}})) for model in models]


def iterations_of_models() -> tuple[Backend, list[Batch]]:
    """tp of 3 does not divide the heads, nobody measured the network beyond eight GPUs, and zero is of training."""
    axes = {"parallel.tp": np.array([1, 3, 4]), "parallel.dp": np.array([1, 2, 4]), "run.batch": np.array([1, 8])}
    point = iterations.step()
    wrong = iterations.step({"run.mode": "decode", "parallel.zero": 1, "run.precision": "fp16_storage"})
    return BACKENDS["step"](), [Batch(point, axes), Batch(wrong), Batch(iterations.step({"parallel.pp": 25}))]


def iterations_under_a_limit() -> tuple[Backend, list[Batch]]:
    """Limits that bind, that do not, and that no clock keeps; operations of whose format no energy is known."""
    simulator = PoweredStepBackend()
    point = simulator.design(iterations.tree(system="h100_8"))
    axes = {"system.gpu.power.cap_w": np.array([700.0, 350.0, 120.0]), "run.batch": np.array([1, 8])}
    unknown = simulator.design(iterations.tree({"run.precision": "fp32"}, system="h100_8"))
    return simulator, [Batch(Batch(point, axes).at(0), axes), Batch(unknown)]


def machines_at_a_price() -> tuple[Backend, list[Batch]]:
    """No scanner makes a die with 400 CUs, and no machine runs at a watt."""
    sections = request(["study=codesign", "~workloads.training", "~workloads.prefill", "machine.num_cus=132"]).tree
    backend = BACKENDS["codesign"]()
    design = backend.design({name: sections[name] for name in ("system", "technology", "machine", "workloads")})
    axes = {"machine.num_cus": np.array([66, 132, 400]), "machine.links": np.array([0.5, 1.0])}
    return backend, [Batch(design, axes), Batch(put(design, "machine.cap_w", 1.0))]


SERVING = ("system", "model", "kernels", "run", "parallel", "server", "engines", "traffic", "slo")


def engines_under_traffic() -> tuple[Backend, list[Batch]]:
    """Nine engines of eight GPUs are more than a node has."""
    words = ["study=serving", "model=llama3_8b", "traffic.requests=50", "server.scheduler.tokens=2048"]
    sections, backend = request(words).tree, BACKENDS["serving"]()
    design = backend.design({name: sections[name] for name in SERVING})
    return backend, [
        Batch(design),
        Batch(put(design, "traffic.concurrency", 4)),
        Batch(put(design, "engines.replicas", 9)),
    ]


def gemms_that_arrive() -> tuple[Backend, list[Batch]]:
    """Eight GPUs share no slots."""
    backend, stream = BACKENDS["arrivals"](), {"name": "s", "kind": "poisson", "jobs": 4, "shapes": [[64, 256, 256]]}
    trees = [
        {"system": tree_of(system), "arrivals": stream, "logic": {"name": "l", "policy": policy}}
        for system, policy in (("mi100", "sequential"), ("mi100", "default"), ("h100_8", "default"))
    ]
    return backend, [Batch(backend.design(tree)) for tree in trees]


def workgroups_of_fused_kernels() -> tuple[Backend, list[Batch]]:
    """No fused kernel reduces around a torus."""
    backend, names = BACKENDS["workgroups"](), ("emb-p10-b512", "gemv-70b_out")
    tree = {"workload": shipped("workload")["fused_ops"], "schedule": shipped("schedule")["fused_kernels"]}
    trees = [backend.scenarios({**tree, "system": tree_of(system)}) for system in ("mi210_2x1", "dlrm_torus")]
    return backend, [Batch(backend.design(scenarios[name])) for scenarios in trees for name in names]


def requests_through_caches() -> tuple[Backend, list[Batch]]:
    """Sets of an L2 that is no power of two are none, nor is a row of DRAM of so few bytes."""
    words = ["study=cache_policies", "application=fw_soft", "policy=combined", "run.requests=1000", "run.repeats=1"]
    sections, simulator = request([*words, "applications=null"]).tree, BACKENDS["memory"]()
    design = simulator.design({name: sections[name] for name in ("system", "application", "policy", "run")})
    wrong = {"system.gpu.l2.bytes": 3 << 20, "system.gpu.dram.row_bytes": 1000}
    changes: list[dict[str, Any]] = [
        {},
        {"system.gpu.l2.bytes": 2 << 20},
        wrong,
        {"system.gpu.mapping.channel_hash": "polynomial"},
    ]
    designs = [functools.reduce(lambda point, item: put(point, *item), values.items(), design) for values in changes]
    return simulator, [Batch(point) for point in designs]


def kernels_through_caches() -> tuple[Backend, list[Batch]]:
    """Kernels in PTX, patterns, and an application that has no kernels."""
    sections, simulator = request(["study=cache_policies_ptx"]).tree, BACKENDS["ptx_memory"]()
    tree = {name: sections[name] for name in ("system", "application", "policy", "run", "kernels")}
    bases = simulator.scenarios({**tree, "applications": ["fw_soft", "lenet"]})
    designs = [simulator.design(base) for base in bases.values()]
    return simulator, [Batch(point) for point in (*designs, put(designs[0], "kernels.addresses", "patterns"))]


def kernels_on_sms() -> tuple[Backend, list[Batch]]:
    """A convolution by its kernels, without a hash of channels and with one."""
    sections, simulator = request(["study=gpgpusim"]).tree, BACKENDS["ptx_sms"]()
    (base,) = simulator.scenarios({name: sections[name] for name in ("sms", "work")} | {"works": ["conv1"]}).values()
    design = simulator.design(base)
    return simulator, [Batch(point) for point in (design, put(design, "sms.channel_hash", "xor"))]


def requests_below_a_tracker() -> tuple[Backend, list[Batch]]:
    """Three bank groups are no power of two, and requests are those of a ring."""
    sections, simulator = request(["study=t3_requests", "workload.only=[tnlg-tp16-op]"]).tree, BACKENDS["near_memory"]()
    tree = {name: sections[name] for name in ("system", "workload", "schedule", "controller")}
    (base,) = simulator.scenarios(tree).values()
    design = simulator.design(base)
    changed = [put(design, "controller.bank_groups", 3), put(design, "system.node.topology", "mesh")]
    return simulator, [Batch(point) for point in (design, *changed)]


def plans_for_recorded_runs() -> tuple[Backend, list[Batch]]:
    """Copy engines add nothing, and 132 SMs are all that there are."""
    simulator, rows = BACKENDS["profile"](), ["start_us,dur_us,stream,name,grid"]
    for place in range(4):
        rows.append(f"{200 * place},100,7,sm90_xmma_gemm,500x1x1")
        rows.append(f"{200 * place + 101},90,20,ncclDevKernel_AllReduce,16x1x1")
    file = Path(tempfile.mkdtemp()) / "run.csv"
    file.write_text("\n".join(rows))
    tree = {"system": tree_of("h100_8"), "workload": {"path": str(file)}, "plan": {}}
    (base,) = simulator.scenarios(tree).values()
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"order": "in_2_parts"},
        {"micro_batches": 2, "fused": True},
        {"mover": "copy_engines"},
        {"sms": 132},
    )
    return simulator, [Batch(simulator.design({**base, "plan": {**base["plan"], **plan}})) for plan in changes]


SCREENED: dict[str, Callable[[], tuple[Backend, list[Batch]]]] = {
    "arrivals": gemms_that_arrive,
    "overlap": a_grid_of_overlap,
    "powered": overlap_under_a_limit,
    "codesign": machines_at_a_price,
    "external": programs_given_a_design_each,
    "function": calls_of_a_function,
    "landscape": searches,
    "measured": predictions,
    "memory": requests_through_caches,
    "near_memory": requests_below_a_tracker,
    "profile": plans_for_recorded_runs,
    "ptx_memory": kernels_through_caches,
    "ptx_sms": kernels_on_sms,
    "serving": engines_under_traffic,
    "step": iterations_of_models,
    "powered_step": iterations_under_a_limit,
    "toy": things,
    "toy on arrays": things_on_arrays,
    "workgroups": workgroups_of_fused_kernels,
}
SCREENED = {name: make for name, make in SCREENED.items() if name in BACKENDS or name.startswith("toy")}


def _marked(name: str) -> Any:
    """The name of a backend, marked as `more` where it is of a plug-in, which compiles kernels for it, and as `nightly`
    where that is under study.
    """
    package = BACKENDS[name].__module__.partition(".")[0] if name in BACKENDS else ""
    if not package.startswith("dse_"):
        return pytest.param(name)
    is_research = any((folder / package).is_dir() for folder in research_folders())
    return pytest.param(name, marks=pytest.mark.nightly if is_research else pytest.mark.more)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(map(_marked, SCREENED)))
def test_a_backend_keeps_what_orchestration_relies_on(name: str) -> None:
    simulator, batches = SCREENED[name]()
    timed = [metric for metric in simulator.metrics if metric.startswith("overhead_s")]
    check_backend(simulator, batches, tolerance=1e-9, timed=timed)


@pytest.mark.slow
def test_every_backend_is_asked_what_it_knows_beforehand() -> None:
    measured = {"torch_gpu"}  # whose results are times: plugins/torch_gpu/tests/test_torch.py
    assert set(BACKENDS) - measured <= set(SCREENED), "give this kit a grid of designs of the new backend"
    screened = Results.join([result for make in SCREENED.values() for result in make()[0].screen(make()[1])])
    assert 0 < screened.ok.sum() < screened.size


# Random designs


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers spread evenly over orders of magnitude."""
    return st.floats(math.log10(low), math.log10(high)).map(lambda exponent: 10.0**exponent)


# Shapes that tiles and GPUs divide, and shapes that nothing divides.
ROWS = st.sampled_from([256, 4096, 16384]) | st.integers(64, 20000)
COLS = st.sampled_from([2048, 8192]) | st.integers(8, 40000)
DEPTH = st.sampled_from([512, 8192]) | st.integers(16, 10000)


@st.composite
def points(draw: st.DrawFn, /, schedule: str, **fixed: Any) -> Point:
    """Arguments of `design`: hardware, shape and the knobs that the schedule has."""
    num_cus = draw(st.integers(2, 400))
    overrides = {
        "system.gpu.num_cus": num_cus,
        "system.gpu.hbm_bytes_per_s": draw(magnitudes(1e11, 2e13)),
        "system.gpu.kernel_launch_s": draw(st.sampled_from([2e-6, 0.0])),
        "system.gpu.dma.num_engines": draw(st.integers(1, 16)),
        "system.gpu.dma.bytes_per_s": draw(st.sampled_from([46.6e9, 400e9])),
        "system.node.topology": draw(st.sampled_from(["mesh", "switch", "ring"])),
        "system.node.num_gpus": draw(st.sampled_from([2, 4, 8])),
        "system.node.link_bytes_per_s": draw(magnitudes(5e9, 5e11)),
        **draw(contention()),
        **draw(knobs(schedule, num_cus)),
        **fixed,
    }
    return {"overrides": overrides, "shape": draw(shapes()), "pattern": draw(st.sampled_from(PATTERNS))}


@st.composite
def contention(draw: st.DrawFn) -> dict[str, float]:
    """As shipped, none, or any."""
    drawn = {path: draw(st.floats(1, 4)) for path in FREE} if draw(st.booleans()) else {}
    return drawn or draw(st.sampled_from([{}, FREE]))


def unslowed(*engines: str) -> dict[str, float]:
    """What to fix of the points of an engine: the closed form refuses nearly all designs with contention laws."""
    return FREE if "analytic" in engines else {}


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    return draw(ROWS), draw(COLS), draw(DEPTH)


_NUM_CHUNKS = {
    "fused": st.sampled_from([1, 1, 4]),  # several have no closed form
    "triggered": st.just(32),
}


@st.composite
def knobs(draw: st.DrawFn, schedule: str, num_cus: int) -> dict[str, Any]:
    fields = shipped("schedule")[schedule]
    library = st.just(0) if fields.get("comm_cus") == 0 and num_cus > 112 else st.nothing()  # for an all-to-all
    drawn = {
        "comm_engine": draw(st.sampled_from(["dma", "cu"])),
        "comm_cus": draw(library | st.integers(1, min(num_cus - 1, 56))),
        "priority": draw(st.sampled_from(["equal", "communication", "compute"])),
        "num_chunks": draw(_NUM_CHUNKS.get(fields["family"], st.integers(1, 5))),
        "withheld_cus": draw(st.integers(0, num_cus - 1)),
    }
    assert set(drawn) == set(DRAWN)
    return {f"schedule.{name}": value for name, value in drawn.items() if name in fields}


def run(engine: str, point: OverlapDesign) -> Timeline:
    return ENGINES[engine].run(lower(point))


def isolated_seconds(graph: TaskGraph) -> Floats:
    """Delay and work of each task, running alone [B, T]."""
    with np.errstate(invalid="ignore"):
        return graph["delay"] + np.where(graph["work"] > 0, graph["work"] / graph.isolated_rate(), 0.0)


def slowed_seconds(graph: TaskGraph) -> Floats:
    """The same while every group that slows a task's group is active [B, T]."""
    with np.errstate(invalid="ignore"):
        working = np.where(graph["work"] > 0, graph["work"] / graph.isolated_rate(), 0.0)
    for (group, _), factor in zip(graph.slowed, graph["factor"].T, strict=True):
        working = np.where(graph.group == group, working / factor[:, None], working)
    return np.asarray(graph["delay"] + working)


def longest_path(graph: TaskGraph) -> float:
    alone = isolated_seconds(graph)[0]
    finish = np.zeros(graph.num_tasks)
    for task in range(graph.num_tasks):
        finish[task] = alone[task] + finish[graph.predecessors(task)].max(initial=0.0)
    return float(finish.max())


@pytest.mark.one_in(4, 1)
@every_engine
@pytest.mark.slow
@drawn(24)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_a_batch_equals_its_designs_run_alone(engine: str, schedule: str, data: st.DataObject) -> None:
    """To the bit, and in the order given, whatever numbers differ between the designs of a batch."""
    base = data.draw(points(schedule))
    changes = {
        "system.gpu.num_cus": st.integers(401, 500),
        "system.gpu.hbm_bytes_per_s": magnitudes(1e11, 2e13),
        "system.gpu.hbm_bytes": magnitudes(1e10, 1e12),
        "system.gpu.matrix_flop_per_s_per_cu": magnitudes(1e12, 1e13),
        "system.gpu.gemm.cache_miss": st.floats(0, 1),
        "system.gpu.cu_copy.setup_s": st.floats(0, 1e-4),
        "system.gpu.dma.setup_s": st.floats(0, 1e-4),
        "system.gpu.dma.num_engines": st.integers(1, 16),
        "system.node.link_bytes_per_s": magnitudes(5e9, 5e11),
    }
    designs = []
    for _ in range(data.draw(st.integers(2, 5))):
        changed = data.draw(st.sets(st.sampled_from(sorted(changes)), max_size=3))
        shape = data.draw(st.just(base["shape"]) | shapes())
        overrides = {**base["overrides"], **{path: data.draw(changes[path]) for path in sorted(changed)}}
        designs.append(design(schedule, **{**base, "shape": shape, "overrides": overrides}))
    together = results(backend(engine), designs)
    assert together == [results(backend(engine), [point])[0] for point in designs]


@pytest.mark.one_in(4, 1)
@pytest.mark.slow
@every_engine
def test_a_batch_of_different_schedules_keeps_its_order(engine: str) -> None:
    overrides = [{"system.gpu.num_cus": cus, **unslowed(engine)} for cus in (304, 200)]
    designs = [design(name, values) for values in overrides for name in SCHEDULES]
    alone = [results(backend(engine), [point])[0] for point in designs]
    assert results(backend(engine), designs) == alone
    assert results(backend(engine), designs[::-1]) == alone[::-1]
    assert len({str(result.metrics) for result in alone}) > len(SCHEDULES)


@pytest.mark.one_in(4, 1)
@pytest.mark.slow
@every_engine
@drawn(40)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_a_design_is_refused_with_a_reason_or_measured_and_again_so_to_the_bit(
    engine: str, schedule: str, data: st.DataObject
) -> None:
    point = design(schedule, **data.draw(points(schedule)))
    first, second = run(engine, point), run(engine, point)
    assert first.issued.tobytes() == second.issued.tobytes()
    assert first.finished.tobytes() == second.finished.tobytes()
    assert first.reason(0) == second.reason(0)
    (result,) = results(backend(engine), [point])
    assert [result] == results(backend(engine), [point])
    assert result.engine == engine
    if result.status == "unsupported":
        assert len(result.reason.split()) > 2
        assert not result.metrics
        assert ENGINES[engine].run(reduce_graph(lower(point)).graph).reason(0) == result.reason
    else:
        assert result.reason == ""
        assert check_results(Results.of([result]), METRICS)[0].status == "ok"


@pytest.mark.one_in(3, 1)
@every_pair
@pytest.mark.slow
@drawn(20)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_a_refused_design_goes_to_the_fallback(pair: tuple[str, str], schedule: str, data: st.DataObject) -> None:
    designs = [design(schedule, **data.draw(points(schedule))) for _ in range(3)]
    first, second = (results(backend(name), designs) for name in pair)
    expected = [b if a.status == "unsupported" else a for a, b in zip(first, second, strict=True)]
    assert results(backend(*pair), designs) == expected


@pytest.mark.slow
@drawn(60)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_some_engine_runs_every_design(schedule: str, data: st.DataObject) -> None:
    point = design(schedule, **data.draw(points(schedule)))
    assert not all(run(engine, point).reason(0) for engine in EXACT)


def assert_within_bounds(timeline: Timeline) -> None:
    """longest path <= makespan <= sum, both of the tasks' durations alone (above: as slow as contention laws allow).

    Below: no task runs faster than alone, nor before its predecessors; each resource needs its total work's time.

    Above: at any moment before the end some task is issued (who waits for a slot waits for one that is). Either a
    delay runs, or a task is active, and then at its cap or a user of a saturated resource r. In both cases the sum
    over active tasks j of rate_j / alone_j is at least 1: a task at its cap contributes 1 by itself; on r, sum use_jr
    rate_j = capacity_r, while alone_j <= capacity_r / use_jr. So progress, counted in seconds alone, is made at a
    rate of at least 1, and the end is reached when it adds up to the sum of all. True of any sharing that leaves no
    usable resource idle, whatever the weights and priorities.
    """
    graph, makespan = timeline.graph, float(timeline.makespan[0])
    assert longest_path(graph) <= makespan * (1 + 1e-9)
    assert makespan <= float(slowed_seconds(graph)[0].sum()) * (1 + 1e-9)
    demand = np.zeros(len(graph.resources))
    np.add.at(demand, graph.use_resource, graph["use"][0] * graph["work"][0, graph.use_task])
    assert (demand / graph["capacity"][0] <= makespan * (1 + 1e-9)).all()


@pytest.mark.one_in(3, 1)
@pytest.mark.slow
@every_exact_engine
@drawn(60)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_the_makespan_lies_between_the_longest_path_and_the_sum_of_all_tasks(
    engine: str, schedule: str, data: st.DataObject
) -> None:
    assume((engine, schedule) != ("analytic", "signalled"))  # a closed form in few designs
    timeline = run(engine, design(schedule, **data.draw(points(schedule, **unslowed(engine)))))
    assume(not timeline.reason(0))
    assert_within_bounds(timeline)


@pytest.mark.one_in(3, 1)
@pytest.mark.slow
@every_exact_engine
@drawn(60)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_no_schedule_beats_the_hardware(engine: str, schedule: str, data: st.DataObject) -> None:
    """The GEMM chain alone, the communication, the FLOP rate, the HBM and the links each bound the makespan."""
    assume((engine, schedule) != ("analytic", "signalled"))  # a closed form in few designs
    point = design(schedule, **data.draw(points(schedule, **unslowed(engine))))
    (result,) = results(backend(engine), [point])
    assume(result.status == "ok")
    metrics, gpu, graph = result.metrics, point.system.gpu, lower(point)
    gemms = graph.of_kind("gemm")
    least = [
        isolated_seconds(graph)[0, gemms].sum(),  # chunks run one at a time
        metrics["gemm_s"],
        metrics["comm_s"],
        metrics["flop"] / (gpu.num_cus * gpu.matrix_flop_per_s_per_cu),
        metrics["hbm_bytes"] / gpu.hbm_bytes_per_s,
        metrics["moved_bytes"] / sum(map(number, links(point.system.node).values())),
    ]
    assert max(least) <= metrics["makespan_s"] * (1 + 1e-9)
    proven = backend(engine).bound(Batch(point), {"makespan_s": np.array([metrics["makespan_s"]])})
    assert proven["gap"][0] >= -1e-9
    assert metrics["exposed_comm_s"] == pytest.approx(metrics["makespan_s"] - metrics["gemm_s"], abs=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.slow
@every_engine
@drawn(25)
@given(data=st.data())
def test_every_schedule_moves_and_computes_the_same(engine: str, data: st.DataObject) -> None:
    """(n - 1) / n of the payload in whole rows, and 2 m n_local k FLOP; HBM traffic is at least compulsory.

    A collective during the GEMM has rows of 1 KiB.
    """
    point = data.draw(points(SCHEDULES[0]))
    common = {path: v for path, v in point["overrides"].items() if path.startswith("system.")}
    designs = {name: design(name, **{**point, "overrides": common}) for name in SCHEDULES}
    supported = {
        name: point_design for name, point_design in designs.items() if not backend(engine).problems(point_design)
    }
    assume("serial" in supported and len(supported) > 1)
    (m, n, k), gpus = point["shape"], point["overrides"]["system.node.num_gpus"]
    local_n = math.ceil(n / gpus)
    for name, result in zip(supported, results(backend(engine), list(supported.values())), strict=True):
        beside = FAMILIES[shipped("schedule")[name]["family"]].orders == ("beside",)
        rows, row_bytes = (max(64, round(m * k / 512)), 1024) if beside else (m, 2 * k)
        moved = (rows - math.ceil(rows / gpus)) * row_bytes
        if result.status == "ok":
            assert result.metrics["moved_bytes"] == moved
            assert result.metrics["flop"] == pytest.approx(2 * m * local_n * k, rel=1e-12)  # parts of a GEMM add up
            assert result.metrics["hbm_bytes"] >= (2 * moved + 2 * (m * k + k * local_n + m * local_n)) * (1 - 1e-12)


@pytest.mark.one_in(4, 1)
@pytest.mark.parametrize("path", ["system.node.link_bytes_per_s", "system.gpu.hbm_bytes_per_s"])
@every_engine
@pytest.mark.slow
@drawn(40)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_more_bandwidth_never_hurts_where_nothing_is_over_subscribed(
    engine: str, schedule: str, path: str, data: st.DataObject
) -> None:
    """A theorem there: every duration falls or stays, and the makespan is the longest path.

    Where tasks compete or slow one another it is none: see the examples with fair sharing at the end of this file.
    """
    point = data.draw(points(schedule, **FREE, **{"system.gpu.hbm_bytes_per_s": data.draw(magnitudes(2e12, 2e13))}))
    more = point["overrides"][path] * data.draw(st.floats(1, 8))
    slow, fast = (
        design(schedule, **point),
        design(schedule, **{**point, "overrides": {**point["overrides"], path: more}}),
    )
    assume(not any(run(name, side).reason(0) for name in {"analytic", engine} for side in (slow, fast)))
    assert run(engine, fast).makespan[0] <= run(engine, slow).makespan[0] * (1 + 1e-9)


@pytest.mark.slow
@every_engine
@pytest.mark.parametrize("schedule", UNIFORM_FUSED)
@drawn(15)
@given(data=st.data())
def test_one_piece_moved_by_dma_is_the_serial_schedule(engine: str, schedule: str, data: st.DataObject) -> None:
    fixed = {"schedule.comm_engine": "dma", "schedule.num_chunks": 1}
    point = data.draw(points(schedule, **fixed))
    overrides = {path: v for path, v in point["overrides"].items() if path not in ("schedule.num_chunks",)}
    overrides = {path: v for path, v in overrides.items() if path != "schedule.comm_cus"}
    single, serial = (
        run(engine, point_design)
        for point_design in (design(schedule, **point), design("serial", **{**point, "overrides": overrides}))
    )
    assert single.reason(0) == serial.reason(0)
    assert single.makespan[0] == pytest.approx(serial.makespan[0], rel=1e-12)


@pytest.mark.slow
@every_pair
@drawn(80)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_engines_agree_on_when_every_task_runs(pair: tuple[str, str], schedule: str, data: st.DataObject) -> None:
    assert_agreement(lower(design(schedule, **data.draw(points(schedule, **unslowed(*pair))))), pair)


def assert_agreement(graph: TaskGraph, pair: tuple[str, str]) -> None:
    """Issue and finish of each task to 1e-9 of its time, wherever neither engine refuses."""
    first, second = (ENGINES[name].run(graph) for name in pair)
    if not first.reason(0) and not second.reason(0):
        np.testing.assert_allclose(first.finished, second.finished, rtol=1e-9)
        np.testing.assert_allclose(first.issued, second.issued, rtol=1e-9)


@pytest.mark.slow
@every_bound
@drawn(100)
@given(graph=graphs() | pipelines())
def test_contention_only_slows(engine: str, graph: TaskGraph) -> None:
    """Without it no task ends later, and the same where the closed form says that there is none; totals likewise."""
    free, exact, closed = ENGINES[engine].run(graph), ENGINES["fluid"].run(graph), ENGINES["analytic"].run(graph)
    assert not free.reason(0)
    assert (free.finished <= exact.finished * (1 + 1e-9)).all()
    totals = ENGINES[engine].totals(graph)
    assert totals.makespan_s[0] <= exact.makespan[0] * (1 + 1e-9)
    if not closed.reason(0):
        np.testing.assert_allclose(free.finished, closed.finished, rtol=1e-12)
        assert_equal_totals(totals, ENGINES["analytic"].totals(graph), rtol=1e-12)


# The semantics, checked on any timeline without simulating it again


def assert_semantics(timeline: Timeline) -> None:
    """A timeline of one design obeys dependencies, slots, queue order and fair sharing."""
    graph, issued, finished = timeline.graph, timeline.issued[0], timeline.finished[0]
    ready = np.array([finished[graph.predecessors(t)].max(initial=0.0) for t in range(graph.num_tasks)])
    assert (issued >= ready).all()
    for pool in range(len(graph.pools)):
        _assert_slots(np.flatnonzero(graph.pool == pool), int(graph.slots[pool]), ready, timeline)
    outside = graph.pool < 0
    assert (issued[outside] == ready[outside]).all()
    _assert_work_done_at_fair_rates(graph, issued + graph["delay"][0], finished)


def _assert_slots(tasks: NDArray[np.intp], slots: int, ready: Floats, timeline: Timeline) -> None:
    """Never more tasks than slots, none waits while one is free, and who was ready first is issued first."""
    issued, finished = timeline.issued[0, tasks], timeline.finished[0, tasks]

    def held(time: float) -> int:
        return int(((issued <= time) & (time < finished)).sum())

    moments = np.unique(np.concatenate([issued, finished, ready[tasks]]))
    assert all(held(time) <= slots for time in moments)
    # a task that takes no time needs a slot too: not all may be held across its moment
    assert all(((issued < time) & (time < finished)).sum() < slots for time in issued)
    for since, until in zip(ready[tasks], issued, strict=True):
        assert all(held(time) == slots for time in moments[(since <= moments) & (moments < until)])
    order = np.argsort(ready[tasks], kind="stable")
    for task, other in itertools.combinations(order, 2):
        assert ready[tasks[task]] == ready[tasks[other]] or issued[task] <= issued[other]


def _assert_work_done_at_fair_rates(graph: TaskGraph, begun: Floats, finished: Floats) -> None:
    """Between any two events the fair rates of the active tasks, summed over time, are each task's work.

    Events within 1e-12 of the clock are one instant: as much work as is done in that time may be missing.
    """
    use = np.zeros((graph.num_tasks, len(graph.resources)))
    np.add.at(use, (graph.use_task, graph.use_resource), graph["use"][0])
    moments, done = np.unique(np.concatenate([begun, finished])), np.zeros(graph.num_tasks)
    for start, stop in itertools.pairwise(moments):
        active = np.flatnonzero((begun <= start) & (finished >= stop) & (graph["work"][0] > 0))
        rates = fair_rates(
            use[active],
            capacity=graph["capacity"][0],
            cap=graph["cap"][0, active] * _slowdown(graph, active),
            weight=graph["weight"][0, active],
            priority=graph.priority[active],
        )
        done[active] += rates * (stop - start)
    works = graph["work"][0] > 0
    slack = 1e-9 * graph["work"][0] + 1e-11 * np.where(works, graph.isolated_rate()[0], 0.0) * finished
    assert (np.abs(done - graph["work"][0]) <= slack).all()


def _slowdown(graph: TaskGraph, active: NDArray[np.intp]) -> Floats:
    """Factors of the groups that have a task active, multiplied, for each active task."""
    factor = dict(zip(map(tuple, graph.slowed.tolist()), graph["factor"][0].tolist(), strict=True))
    present = set(graph.group[active].tolist())
    return np.array(
        [math.prod(factor.get((group, other), 1.0) for other in present) for group in graph.group[active].tolist()]
    )


# Random task graphs


@pytest.mark.slow
@every_exact_engine
@drawn(100)
@given(graph=graphs())
def test_a_random_graph_runs_by_the_rules(engine: str, graph: TaskGraph) -> None:
    timeline = ENGINES[engine].run(graph)
    if timeline.reason(0):
        assert len(timeline.reason(0).split()) > 2
    else:
        assert_semantics(timeline)
        assert_within_bounds(timeline)


@pytest.mark.slow
@pytest.mark.parametrize("engine", sorted(set(EXACT) - {"event"}))
@drawn(100)
@given(graph=graphs() | pipelines())
def test_every_engine_agrees_with_the_reference_on_random_graphs(engine: str, graph: TaskGraph) -> None:
    assert_agreement(graph, ("event", engine))


@pytest.mark.one_in(2)
@pytest.mark.slow
@every_engine
@drawn(100)
@given(graph=graphs() | pipelines())
def test_totals_are_those_of_the_timelines(engine: str, graph: TaskGraph) -> None:
    """Of the engine's own and of the reference's, wherever the engine does not refuse; it refuses both or neither."""
    totals, timeline = ENGINES[engine].totals(graph), ENGINES[engine].run(graph)
    assert (totals.refused[0] if totals.refused else "") == timeline.reason(0)
    if not timeline.reason(0):
        assert_equal_totals(totals, timeline.totals())
        if engine in EXACT:
            assert_equal_totals(totals, ENGINES["event"].run(graph).totals())


@pytest.mark.one_in(4, 1)
@pytest.mark.slow
@every_engine
@drawn(25)
@given(grid=grids(), data=st.data())
def test_a_random_grid_equals_its_designs_to_the_bit(engine: str, grid: Plan, data: st.DataObject) -> None:
    """In any order, and as graphs that were built alone, where equal numbers are one column from the start."""
    graph = grid.build()
    order = np.array(data.draw(st.permutations(range(graph.num_designs))))
    unshuffled, shuffled = ENGINES[engine].run(graph), ENGINES[engine].run(graph.take(order))
    assert unshuffled.finished[order].tobytes() == shuffled.finished.tobytes()
    assert unshuffled.issued[order].tobytes() == shuffled.issued.tobytes()
    together = evaluated(engine, graph)
    assert [together[place] for place in order] == evaluated(engine, graph.take(order))
    assert together == [evaluated(engine, grid.at(place, graph.shape).build())[0] for place in np.ndindex(graph.shape)]


def evaluated(engine: str, graph: TaskGraph) -> list[tuple[Any, ...]]:
    """Totals of each design as the backend computes them: in parts, reduced."""
    outcomes: dict[int, tuple[Any, ...]] = {}
    for places, alike in patterns(graph):
        small = reduce_graph(alike).graph
        totals = ENGINES[engine].totals(small).flat(small)
        columns = [totals.makespan_s, totals.peak_staged_bytes, totals.cu_s]
        columns += [*totals.busy_s.values(), *totals.spent_s.values()]
        for row, place in enumerate(range(graph.num_designs) if places is None else places.tolist()):
            reason = totals.refused[row] if totals.refused else ""
            outcomes[place] = (reason,) if reason else tuple(float(column[row]) for column in columns)
    return [outcomes[place] for place in range(graph.num_designs)]


# The solve


@st.composite
def contests(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `fair_rates`: every task has a cap, or a resource that limits it."""
    tasks, resources = draw(st.integers(1, 10)), draw(st.integers(1, 5))
    use = [[draw(st.just(0.0) | AMOUNTS) for _ in range(resources)] for _ in range(tasks)]
    caps = [draw(AMOUNTS | st.just(math.inf)) if any(row) else draw(AMOUNTS) for row in use]
    return {
        "use": np.array(use),
        "capacity": np.array([draw(AMOUNTS) for _ in range(resources)]),
        "cap": np.array(caps),
        "weight": np.array([draw(AMOUNTS) for _ in range(tasks)]),
        "priority": np.array([draw(st.integers(0, 2)) for _ in range(tasks)], dtype=np.int32),
    }


def certified(task: int, rate: Floats, contest: dict[str, Any]) -> bool:
    """At its cap, or on a saturated resource where nobody of its class has a higher level and no later class any."""
    use, capacity, priority = contest["use"], contest["capacity"], contest["priority"]
    if rate[task] >= contest["cap"][task] * (1 - 1e-9):
        return True
    level = rate / contest["weight"]
    excess = np.where(priority == priority[task], np.maximum(level - level[task], 0.0) * contest["weight"], 0.0)
    envied = excess + np.where(priority > priority[task], rate, 0.0)
    saturated = (use[task] > 0) & (rate @ use >= capacity * (1 - 1e-9))
    return bool((saturated & (envied @ use <= 1e-9 * capacity)).any())


@pytest.mark.slow
@drawn(200)
@given(contest=contests())
def test_fair_rates_carry_their_own_certificate(contest: dict[str, Any]) -> None:
    """Feasible and certified for each task: this characterises the weighted max-min share under strict priority."""
    rate = fair_rates(**contest)
    assert (rate >= 0).all()
    assert (rate <= contest["cap"]).all()
    assert (rate @ contest["use"] <= contest["capacity"] * (1 + 1e-9)).all()
    assert all(certified(task, rate, contest) for task in range(len(rate)))


# Reading a timeline


@pytest.mark.slow
@every_engine
@drawn(30)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_a_replay_tells_what_the_metrics_say(engine: str, schedule: str, data: st.DataObject) -> None:
    """Intervals make up the makespan, bytes and FLOP; the limits of the critical path make up its length."""
    point = design(schedule, **data.draw(points(schedule)))
    (result,) = results(backend(engine), [point])
    if result.status == "unsupported":
        with pytest.raises(ConfigError, match="use simulator="):
            backend(engine).replay(point)
        return
    shown = backend(engine).replay(point)
    assert max(interval.finish_s for interval in shown.intervals) == pytest.approx(
        result.metrics["makespan_s"], rel=1e-12
    )
    assert sum(interval.moved_bytes for interval in shown.intervals) == pytest.approx(
        result.metrics["moved_bytes"], rel=1e-12
    )
    assert sum(interval.flop for interval in shown.intervals) == pytest.approx(result.metrics["flop"], rel=1e-12)
    assert all(interval.start_s < interval.finish_s for interval in shown.intervals)
    # each share below 1e-3 is left out
    assert 1 - 1e-3 * 8 <= sum(shown.limits.values()) <= 1 + 1e-9


@pytest.mark.parametrize("schedule", DISTINCT)
def test_a_design_related_to_itself_gains_nothing(schedule: str) -> None:
    (result,) = results(backend("event"), [design(schedule)])
    columns = {name: np.array([value]) for name, value in result.metrics.items()}
    relations = {name: number(column[0]) for name, column in backend("event").relate(columns, columns).items()}
    assert set(relations) == set(RELATIONS)
    assert (relations["speedup"], relations["fraction_of_ideal"], relations["share_of_baseline_ideal"]) == (1, 0, 0)
    assert 1 < relations["baseline_ideal_speedup"] <= 2
    assert relations["ideal_speedup"] >= 1


# Schedule families: all their declared knobs, in all combinations


@st.composite
def family_knobs(draw: st.DrawFn, kind: type[BaseModel]) -> dict[str, Any]:
    """A value for every knob that a family declares; None where a knob may be None."""
    knob_values = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.json_schema_extra, dict) and "structural" in field.json_schema_extra:
            knob_values[f"schedule.{name}"] = draw(_values(field.annotation))
    return knob_values


def _values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a knob's type: choices, small whole numbers, shares, None."""
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _values(get_args(annotation)[0])
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(1, 8)
    if annotation is float:
        return st.floats(0, 0.5)
    parts = get_args(annotation)
    if not parts:
        raise NotImplementedError(f"teach this kit to draw {annotation}")
    return st.one_of(*(_values(part) for part in parts))


MASKED = [
    name
    for name, kind in FAMILIES.items()
    if "comm_engine" in kind.model_fields
    and name not in {"gathered_in_switch", "in_switch", "signalled", "synthesised"}
]
"""Families that may take CUs from their GEMM, by `comm_cus`; the kernels of the others slow it instead, or in steps."""


def a_schedule_of(family: str) -> str:
    return next(name for name, tree in shipped("schedule").items() if tree["family"] == family)


def family_point(
    family: str, drawn: dict[str, Any], overrides: dict[str, Any], **workload: Any
) -> OverlapDesign | None:
    """A design of the family that validates and breaks no rule, or None."""
    try:
        point = design(a_schedule_of(family), {**drawn, **overrides}, **workload)
    except ConfigError:
        return None
    return None if backend("event").problems(point) else point


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@drawn(60)
@given(data=st.data())
def test_what_validates_and_breaks_no_rule_can_be_evaluated(family: str, data: st.DataObject) -> None:
    """However small the shape: a schedule says what it cannot do before it is run."""
    drawn = data.draw(family_knobs(FAMILIES[family]))
    shape = data.draw(st.tuples(*[st.integers(1, 20) | st.integers(21, 5000)] * 3))
    gpus = data.draw(st.sampled_from([1] if family in OF_STREAMS else [2, 3, 8]))
    topology = data.draw(st.sampled_from(["mesh", "switch", "ring"]))
    hardware = {"system.node.num_gpus": gpus, "system.node.topology": topology}
    point = family_point(family, drawn, hardware, shape=shape)
    assume(point is not None)
    assert point is not None
    for engine in ENGINES:
        (result,) = results(backend(engine), [point])
        assert result.status == "unsupported" or check_results(Results.of([result]), METRICS)[0].status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("family", MASKED)
@drawn(40)
@given(data=st.data())
def test_compute_never_gets_the_cus_that_communication_holds(family: str, data: st.DataObject) -> None:
    """CUs granted to the GEMM of the moment and CUs of the kernels that run beside it are not more than there are.

    Of a GEMM that is masked. One that is not is slowed instead, to what it would be without these CUs: see
    plugins/calibration/tests/test_contention.py.
    """
    drawn = {**data.draw(family_knobs(FAMILIES[family])), "schedule.comm_engine": "cu"}
    if drawn.get("schedule.comm_cus", 1) is None and "comm_cus" in shipped("schedule")[a_schedule_of(family)]:
        drawn["schedule.comm_cus"] = 8
    if "schedule.partition" in drawn:
        drawn |= {"schedule.partition": True, "schedule.launch_order": "gemm_first"}
    point = family_point(family, drawn, {}, shape=data.draw(shapes()))
    assume(point is not None)
    assert point is not None
    timeline = run("event", point)
    graph, on_cus = timeline.graph, timeline.graph.resources.index("cu")
    uses = np.flatnonzero(graph.use_resource == on_cus)
    tasks = graph.use_task[uses]
    granted = graph["use"][:, uses] * graph["cap"][:, tasks]
    begun = timeline.issued[:, tasks] + graph["delay"][:, tasks]
    together = (begun[0][:, None] >= begun[0]) & (begun[0][:, None] < timeline.finished[0, tasks])
    assert (together @ granted[0]).max() <= point.system.gpu.num_cus * (1 + 1e-9)


@pytest.mark.parametrize("chunk_dim", ["m", "k"])
@pytest.mark.parametrize("compute", ["fused", "unfused"])
@pytest.mark.parametrize("mover", ["dma", "cu"])
def test_nothing_runs_before_the_first_pieces_land_in_a_uniform_start(chunk_dim: str, compute: str, mover: str) -> None:
    knobs = {"chunk_dim": chunk_dim, "local_shard_first": False, "compute": compute, "comm_engine": mover}
    graph = lower(design("uniform_fused_1d", {f"schedule.{name}": value for name, value in knobs.items()}))
    timeline = ENGINES["event"].run(graph)
    landed = timeline.finished[0, graph.of_kind("transfer")].min()
    assert (timeline.issued[0, graph.of_kind("gemm")] >= landed).all()


@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_splitting_rows_reads_b_again_and_splitting_k_reads_and_writes_c_again(pieces: int) -> None:
    """Compulsory HBM traffic of the GEMM chunks, where caches hold all re-reads inside a chunk."""
    m, n, k = 4096, 8192, 2048
    a, b, c = 2 * m * k, 2 * k * (n // 8), 2 * m * (n // 8)
    moved = 2 * (a * 7 // 8)  # read for a peer, written from a peer
    expected = {"m": a + pieces * b + c, "k": a + b + (3 * pieces - 2) * c}
    for shape, traffic in expected.items():
        knobs = {"schedule.chunk_dim": shape, "schedule.num_chunks": pieces, "system.gpu.gemm.cache_miss": 0.0}
        (result,) = results(backend("event"), [design("uniform_fused_1d", knobs, shape=(m, n, k))])
        assert result.metrics["hbm_bytes"] == moved + traffic


# Examples

REFUSED_GRAPHS: dict[str, Callable[[GraphBuilder], object]] = {
    "work must be >= 0": lambda b: b.task("wrong", "gemm", work=-1.0, cap=1.0),
    "delay must be >= 0": lambda b: b.task("wrong", "gemm", delay=math.nan),
    "work must be >= 0, finite": lambda b: b.task("wrong", "gemm", work=math.inf, cap=1.0),
    "cap must be > 0": lambda b: b.task("wrong", "gemm", work=1.0, cap=0.0),
    "weight must be > 0": lambda b: b.task("wrong", "gemm", work=1.0, cap=1.0, weight=0.0),
    "neither a cap nor a finite resource": lambda b: b.task("wrong", "gemm", work=1.0),
    "a use must be > 0": lambda b: b.task("wrong", "gemm", work=1.0, uses={b.resource("r", 1.0): 0.0}),
    "the capacity of a resource must be > 0": lambda b: b.resource("wrong", 0.0),
    "must be tasks added before it": lambda b: b.task("wrong", "gemm", after=[0]),
}


@pytest.mark.parametrize("rule", REFUSED_GRAPHS)
def test_a_graph_that_means_nothing_is_refused_by_name(rule: str) -> None:
    build = GraphBuilder()
    with pytest.raises(ValueError, match=f"wrong.*{rule}"):
        REFUSED_GRAPHS[rule](build)
        build.build()


@pytest.mark.parametrize(
    "wrong",
    [{"weight": math.inf}, {"uses": {0: math.inf}}, {"uses": {-1: 1.0}}, {"uses": {7: 1.0}}, {"pool": 3}],
    ids=str,
)
def test_a_task_that_no_engine_can_run_is_refused_when_the_graph_is_built(wrong: dict[str, Any]) -> None:
    """Infinite weights and uses have no fair share; a resource or pool must be one that was declared."""
    build = GraphBuilder()
    wire = build.resource("wire", 1.0)
    with pytest.raises(ValueError, match="wrong"):
        build.task("wrong", "transfer", **{"uses": {wire: 1.0}, "work": 1.0, **wrong})
        build.build()


@every_exact_engine
def test_a_slot_is_granted_by_instant_then_by_index_and_not_by_round_or_priority(engine: str) -> None:
    build = GraphBuilder()
    pool = build.pool("slot", 1)
    common: dict[str, Any] = {"pool": pool, "work": 1.0, "cap": 1.0}
    build.task("holds the slot", "gemm", pool=pool, work=2.0, cap=1.0)
    root = build.task("ends at 1", "gemm", work=1.0, cap=1.0)
    between = build.task("takes no time", "gemm", after=[root])
    later_round = build.task("ready at 1, in the second round", "gemm", after=[between], priority=1, **common)
    urgent = build.task("ready at 1, in the first round", "gemm", after=[root], priority=0, **common)
    waits_longest = build.task("ready at 0", "gemm", priority=2, **common)
    timeline = ENGINES[engine].run(build.build())
    assert not timeline.reason(0) or engine not in ("event", "fluid")
    if not timeline.reason(0):
        assert timeline.issued[0, [waits_longest, later_round, urgent]].tolist() == [2.0, 3.0, 4.0]


@every_pair
@pytest.mark.parametrize("missing", [1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 0.0, -1e-12, -1e-6, -1e-2])
def test_engines_agree_on_both_sides_of_saturation(pair: tuple[str, str], missing: float) -> None:
    """Two tasks on a resource that lacks this share of what they ask for."""
    build = GraphBuilder()
    wire = build.resource("wire", 2.0 * (1 - missing))
    for name in ("one", "other"):
        build.task(name, "transfer", uses={wire: 1.0}, work=1.0, cap=1.0)
    assert_agreement(build.build(), pair)


@every_pair
@pytest.mark.parametrize("tiny", [1e-20, 1e-16, 1e-14, 1e-11])
def test_engines_agree_on_who_was_ready_first_however_little_before(pair: tuple[str, str], tiny: float) -> None:
    """An instant that follows another is a later one, though the clock may not tell them apart."""
    build = GraphBuilder()
    pool = build.pool("slot", 1)
    build.task("holds the slot", "gemm", pool=pool, delay=2.0)
    first = build.task("first", "gemm", delay=1.0)
    then = build.task("a moment later", "gemm", after=[first], delay=tiny)
    build.task("ready later", "gemm", after=[then], pool=pool, delay=1.0)
    build.task("ready first", "gemm", after=[first], pool=pool, delay=1.0)
    graph = build.build()
    assert_agreement(graph, pair)
    issued = ENGINES["event"].run(graph).issued[0]
    assert issued[4] < issued[3]


def test_tasks_that_end_in_one_instant_are_served_by_index() -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit and still are one moment, or the later task would be served first."""
    build = GraphBuilder()
    pool = build.pool("slot", 1)
    first = build.task("first", "gemm", delay=0.1)
    sooner = build.task("0.1 + 0.2", "gemm", after=[first], delay=0.2)
    later = build.task("0.3", "gemm", delay=0.3)
    served = build.task("served first", "gemm", after=[sooner], pool=pool, delay=1.0)
    waits = build.task("waits", "gemm", after=[later], pool=pool, delay=1.0)
    timeline = ENGINES["event"].run(build.build())
    assert 0.1 + 0.2 > 0.3
    assert timeline.finished[0, sooner] == timeline.finished[0, later] == timeline.issued[0, served]
    assert timeline.issued[0, waits] == timeline.finished[0, served]


def test_more_cus_within_a_wave_change_nothing() -> None:
    """64 tiles take one wave on 64 CUs as on 96, and two on 63."""
    free = {
        "system.gpu.gemm.tiles": [{"rows": 256, "cols": 256, "efficiency": 1.0}],
        "system.gpu.gemm.serial_fraction": 0.0,
        "schedule.comm_engine": "dma",
    }
    seconds = {}
    for cus in (63, 64, 96):
        point = design("serial", {**free, "system.gpu.num_cus": cus}, shape=(2048, 16384, 8192))
        seconds[cus] = float(gemm_cost(WaveGemms.of(point.system.gpu, "bf16"), GemmShape(2048, 2048, 8192)).seconds)
        (result,) = results(backend("event"), [point])
        assert result.metrics["gemm_s"] == pytest.approx(seconds[cus] + 2e-6)
    assert seconds[96] == seconds[64]
    assert seconds[63] == pytest.approx(2 * seconds[64])


def test_the_kit_notices_a_timeline_that_breaks_the_rules() -> None:
    """The checks above can fail: a task that ends early, starts early, or waits for nothing is caught."""
    timeline = run("event", design("hetero_unfused_1d"))
    assert_semantics(timeline)
    last = int(np.argmax(timeline.finished[0]))
    for name, factor in (("finished", 0.999), ("finished", 1.001), ("issued", 0.999), ("issued", 1.001)):
        changed = getattr(timeline, name).copy()
        changed[0, last] *= factor
        with pytest.raises(AssertionError):
            assert_semantics(replace(timeline, **{name: changed}))
