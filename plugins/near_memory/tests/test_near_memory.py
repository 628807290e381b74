"""T3 request by request: bytes are conserved, banks keep their times, and the fluid model is met where it holds."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.backend import Batch, Result
from dse.cli import main
from dse.config.compose import request
from dse.errors import ConfigError
from dse.results.run_folder import Outputs
from dse.space import set_path
from dse.study.plan import plan
from dse_near_memory import engine
from dse_near_memory import state as fields
from dse_near_memory.address_map import LINE_BYTES, AddressMap, Range
from dse_near_memory.agreement import LARGE, SCHEDULES, gaps
from dse_near_memory.backend import RequestBackend, RequestDesign
from dse_near_memory.controller import Controller
from dse_near_memory.requests import channels_of, place_in_cache, place_in_channel
from dse_near_memory.simulation import Outcome, SubLayer, idle
from dse_near_memory.state import Rules, State, Work
from simulators.device.records import table
from simulators.workloads.model_zoo import option_tree

Shape = tuple[int, int, int]
TRACKED = SCHEDULES[4:]
SMALL = {"controller__dram__channels": 4, "controller__dram__bytes_per_s": 128e9, "controller__sampled_channels": 4}


@cache
def shipped() -> dict[str, Any]:
    tree = request(["study=t3_requests"]).tree
    return {name: tree[name] for name in ("system", "workload", "schedule", "controller")}


@cache
def backend() -> RequestBackend:
    return RequestBackend()


def point(schedule: str, gpus: int = 8, shape: Shape = (8192, 4256, 17024), **over: Any) -> RequestDesign:
    """A GEMM of T3's simulated GPUs, with k over all GPUs; over: values by dotted path."""
    tree = copy.deepcopy(shipped())
    tree["schedule"] = option_tree("schedule", schedule)
    m, n, k = shape
    shapes = [{"name": "x", "m": m, "n": n, "k": k, "shards": gpus}]
    tree["workload"] = {"name": "test", "pattern": "all_reduce", "shapes": shapes, "precision": "fp16"}
    tree = copy.deepcopy(dict(backend().scenarios(tree)["x"]))  # sections are known by identity
    for path, value in over.items():
        set_path(tree, path.replace("__", "."), value)
    return backend().design(tree)


def layer(schedule: str, *args: Any, **over: Any) -> SubLayer:
    design = point(schedule, *args, **over)
    return SubLayer(design.system, design.workload, design.schedule, design.controller)  # type: ignore[arg-type]


def outcome(schedule: str, *args: Any, **over: Any) -> Outcome:
    return layer(schedule, *args, **over).simulate()


sizes = st.tuples(st.integers(130, 700), st.integers(130, 700), st.integers(64, 2048))

# Bytes


@given(lines=st.integers(40, 10**6), gpus=st.integers(2, 32))
def test_an_address_map_covers_an_output_once(lines: int, gpus: int) -> None:
    for addresses in (
        AddressMap.tracked_ring(64 * lines, gpus),
        AddressMap.by_kernels(64 * lines, gpus, updates=False),
        AddressMap.by_kernels(64 * lines, gpus, updates=True),
    ):
        assert sum(part.lines for part in addresses.ranges) == addresses.lines == lines
        assert {part.lines for part in addresses.ranges} <= {lines // gpus, lines // gpus + 1}
    tracked = AddressMap.tracked_ring(64 * lines, gpus)
    first = tracked.ranges[0].lines
    assert tracked.updates() == (lines - first, lines - first)
    assert sum(part.forwarded for part in tracked.ranges) == gpus - 2


def test_a_map_with_a_gap_is_refused() -> None:
    parts = [Range(first, last, "local", "store", False, False) for first, last in ((0, 4), (5, 9))]
    with pytest.raises(ValueError, match="follow one another"):
        AddressMap(tuple(parts))


@pytest.mark.nightly
@settings(max_examples=20, deadline=None)
@given(
    shape=sizes,
    gpus=st.integers(3, 6),
    schedule=st.sampled_from(("t3_sequential", "t3_sequential_nmc", *TRACKED)),
    last=st.booleans(),
)
def test_channels_serve_each_byte_of_the_map_the_tracker_and_the_program_once(
    shape: Shape, gpus: int, schedule: str, last: bool
) -> None:
    """With all channels: requests by kind and part; each region has counted all its updates and left its entry."""
    run = layer(schedule, gpus, shape, **SMALL, controller__sums_last=last).run()
    served, traffic = run.served * LINE_BYTES, run.traffic
    kinds = {"GEMM reads": (0, 0), "GEMM writes": (1, 0), "RS reads": (2, 1), "AG reads": (2, 2)}
    kinds |= {"RS writes": (3, 1), "AG writes": (3, 2)}
    assert {name: served[place] for name, place in kinds.items()} == traffic
    assert served.sum() == sum(traffic.values())
    if schedule in TRACKED:
        assert not run.state.region_left.any() and not run.state.chunk_left[1:].any()
        assert (run.state.entry == -1).all() and run.state.tracker.live == 0


def least_recently_used(work: Work, rules: Rules) -> int:
    """Requests for inputs that miss, of a CU that works alone: an ordered dictionary for each set."""
    sets: dict[int, OrderedDict[int, set[int]]] = defaultdict(OrderedDict)

    def missed(where: int, entry: int) -> bool:
        lines, (line, sector) = sets[where], divmod(entry, fields.MOST_SECTORS)
        sectors = lines.setdefault(line, set())
        lines.move_to_end(line)
        if len(lines) > rules.cache_ways:
            lines.popitem(last=False)
        new = sector not in sectors
        sectors.add(sector)
        return new

    count = 0
    for unit in range(rules.units):
        panels = work.need_panel[work.need_first[unit] : work.need_first[unit + 1]]
        for step, panel in itertools.product(range(rules.steps), panels.tolist()):
            block = slice(*work.read_first[panel * rules.steps + step :][:2].tolist())
            count += sum(itertools.starmap(missed, zip(work.read_set[block], work.read_entry[block], strict=True)))
        for line in work.store_line[work.store_first[unit] : work.store_first[unit + 1]] if rules.cached else ():
            missed(work.store_set[line], work.store_entry[line])
    return count


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    shape=sizes,
    size=st.sampled_from((1, 64, 128, 200, 10**5)),
    ways=st.integers(1, 16),
    bypass=st.booleans(),
    parts=st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((64, 128, 256))),
)
def test_a_cache_keeps_what_was_used_last(
    shape: Shape, size: int, ways: int, bypass: bool, parts: tuple[int, int]
) -> None:
    """Reads of the GEMM are those of a reference; where all fits, each line of both operands once."""
    over = {"system__gpu__num_cus": 1, "system__gpu__llc__bytes": size * 1024, "system__gpu__llc__ways": ways}
    over |= {"controller__slices": parts[0], "controller__cache_line_bytes": parts[1]}
    gemm = layer("t3_ideal_nmc" if bypass else "t3_sequential", 3, shape, **SMALL, **over)
    run = gemm._run(gemm._map, [])
    assert run.served[0].sum() == least_recently_used(run.work, run.rules) >= len(run.work.read_place)
    assert size < 10**5 or run.served[0].sum() == len(run.work.read_place)
    assert run.served[1].sum() == (1 - run.work.away[run.work.chunk]).sum()


@given(
    chunk=st.integers(0, 2**12),
    slices=st.sampled_from((1, 2, 4, 16)),
    line=st.sampled_from((64, 128, 256)),
    hashed=st.sampled_from(("none", "xor", "polynomial")),
)
def test_lines_of_the_cache_lie_in_one_set_and_slices_share_them_evenly(
    chunk: int, slices: int, line: int, hashed: str
) -> None:
    """64 KiB of a channel: each cache line is that of neighbours, whole, and slices and sets have as many each."""
    over: Any = {"controller__slices": slices, "controller__cache_line_bytes": line, "controller__cache_hash": hashed}
    controller = point("t3", **over).controller
    chunks = np.arange(8192) + 8192 * chunk
    lines = (chunks[channels_of(chunks, controller) == 0, None] * 4 + np.arange(4)).reshape(-1)
    where, entry = place_in_cache(lines, np.zeros_like(lines), controller, 16)
    together = np.stack([where, entry // fields.MOST_SECTORS], 1).reshape(-1, line // LINE_BYTES, 2)
    assert (together == together[:, :1]).all() and len(np.unique(together[:, 0], axis=0)) == len(together)
    assert np.ptp(np.bincount(where, minlength=16 * slices)) == 0


@given(chunk=st.integers(0, 2**20), bits=st.sets(st.integers(6, 14), min_size=4, max_size=4), bank_xor=st.booleans())
def test_addresses_have_places_of_their_own(chunk: int, bits: set[int], bank_xor: bool) -> None:
    over: Any = {"controller__bank_bits": sorted(bits), "controller__mapping__bank_xor": bank_xor}
    controller = point("t3", **over).controller
    chunks = np.arange(32) + 32 * chunk
    assert sorted(channels_of(chunks, controller).tolist()) == list(range(32))
    lines = np.arange(2048) + 2048 * chunk
    places, lines_of_place = np.unique(place_in_channel(lines, controller), return_counts=True)
    assert len(places) == 64 and (lines_of_place == 32).all()  # rows of 2048 bytes, each in a bank of its own
    if not bank_xor:
        banks = sum((lines * LINE_BYTES >> bit & 1) << place for place, bit in enumerate(sorted(bits)))
        assert (place_in_channel(lines, controller) % 16 == banks).all()


# Banks

BURST = 2.0  # of 64 bytes at 32 GB/s


def serve(places: list[int], *, writes: bool = False, updates: bool = False, **over: Any) -> tuple[float, State]:
    """Time at which one channel has served requests that are all there from the start, and its state."""
    template = layer("t3", 3, (256, 256, 192), **SMALL).run()
    rules = template.rules._replace(
        **{"trefi": 1e12, "cache_hit": 0.0, **over}, channels=1, steps=1, tracked=0, cached=0
    )
    count = len(places)
    rules = rules._replace(cus=1, units=1, needs=1, lockstep=0)
    reads, stores = (0, count) if writes else (count, 0)
    zeros, lines = np.zeros(count, np.int64), fields.MOST_SECTORS * np.arange(count)
    work = template.work._replace(
        read_first=np.array([0, reads]), read_channel=zeros, read_place=np.array(places, np.int64), read_set=zeros,
        read_entry=lines, need_first=np.array([0, 1]), need_panel=np.zeros(1, np.int64),
        store_first=np.array([0, stores]), store_line=np.arange(stores), channel=zeros,
        place=np.array(places, np.int64), chunk=zeros, away=np.zeros(1, np.int64), region=zeros,
        program=table(0, fields.STEP), step_ns=np.full(1, 1e-9), store_updates=int(updates),
    )  # fmt: skip
    caches: dict[str, Any] = {
        "cache_line": np.full_like(template.state.cache_line, -1),
        "cache_there": np.zeros_like(template.state.cache_there),
    }
    slots, left = 1 << count.bit_length(), len(work.store_line)
    state = template.state._replace(**idle(rules, work, stores=left, slots=slots), **caches)
    return engine.run(work, state, rules), state


@given(count=st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_reads_of_one_row_are_a_column_of_its_bank_group_apart(count: int) -> None:
    end, state = serve([16 * 7 + 4] * count)
    assert end == pytest.approx(14 + (count - 1) * 4 + BURST)  # tRCD, two columns of tCCDL each, the last burst
    assert state.counts.activations == 1 and state.counts.row_hits == count - 1


@given(count=st.integers(2, 60), writes=st.booleans())
@settings(max_examples=20, deadline=None)
def test_rows_of_one_bank_are_opened_one_after_the_other(count: int, writes: bool) -> None:
    end, state = serve([16 * row for row in range(count)], writes=writes)
    apart = max(33, 14 + BURST + (14 if writes else 0)) + 14  # tRAS, or tRCD, burst and tWR; tRP
    assert end == pytest.approx(14 + (count - 1) * apart + BURST, abs=1e-6)  # tRCD, or the turn of the bus, first
    assert state.counts.activations == count


@given(rounds=st.integers(2, 15), columns=st.sampled_from((1.0, 2.0, 4.0)))
@settings(max_examples=20, deadline=None)
def test_updates_fill_the_bus_if_bank_groups_share_their_longer_columns(rounds: int, columns: float) -> None:
    """4 bank groups: an update takes its group 2 x columns x tCCDL, and the bus one burst."""
    group = 4 * columns
    spread, _ = serve([0, 1, 2, 3] * rounds, writes=True, updates=True, update_group=group)
    alone, _ = serve([0] * 4 * rounds, writes=True, updates=True, update_group=group)
    assert alone == pytest.approx(14 + (4 * rounds - 1) * group + BURST, abs=1e-6)  # the bus turns to writes meanwhile
    assert spread == pytest.approx(14 + rounds * max(4 * BURST, group), abs=group + BURST)


def test_a_refresh_closes_rows_and_takes_its_time() -> None:
    quiet, _ = serve([4] * 40)
    busy, state = serve([4] * 40, trefi=100.0, trfc=260.0)
    refreshes = int(state.counts.refreshes)
    assert refreshes >= 3 and state.counts.activations == refreshes + 1
    assert busy >= quiet + refreshes * 260


# The whole


@pytest.mark.nightly
@pytest.mark.parametrize("case", [LARGE[0], *(pytest.param(case, marks=pytest.mark.more) for case in LARGE[1:])])
def test_requests_meet_the_fluid_model_where_its_assumptions_hold(case: str) -> None:
    """Within 5 % for large FC layers; not for OP layers, whose own updates take half of a wave."""
    assert max(map(abs, gaps(shipped(), case).values())) < 0.05
    small = gaps(shipped(), "megagpt2-tp8-op")
    assert max(abs(small[name]) for name in SCHEDULES[:4]) < 0.05 < small["t3_mca"]


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["t3_sequential", "t3", "t3_mca"])
def test_two_channels_stand_for_all(schedule: str) -> None:
    """A small sub-layer at two of its 32 channels and at all of them: times and reads within 1 %, other bytes the same.

    With a cache so small that most of what it holds is read again.
    """
    sample, every_channel = (
        outcome(schedule, 4, (4096, 2048, 2048), controller__sampled_channels=count, system__gpu__llc__bytes=2e6)
        for count in (2, 32)
    )
    assert sample.seconds == pytest.approx(every_channel.seconds, rel=0.01)
    reads, every_read = (result.traffic.pop("GEMM reads") for result in (sample, every_channel))
    assert reads == pytest.approx(every_read, rel=0.01) and every_read > 1.5 * 2 * 512 * (4096 + 2048)
    assert sample.traffic == every_channel.traffic


@pytest.mark.slow
def test_arbitration_pays_where_bursts_hold_up_a_gemm() -> None:
    """For a large FC layer; where reads overtake own updates, too, arbitration reaches the ideal."""
    shape = (16384, 3072, 12288)
    times = {name: outcome(name, 16, shape).seconds for name in ("t3", "t3_fair", "t3_mca", "t3_ideal_nmc")}
    assert times["t3"] > 1.02 * times["t3_fair"] and times["t3_fair"] >= times["t3_mca"] > 1.03 * times["t3_ideal_nmc"]
    free = outcome("t3_mca", 16, shape, controller__store_buffer=10**9).seconds
    assert free == pytest.approx(times["t3_ideal_nmc"], rel=0.005)
    assert outcome("t3_mca", 16, shape, controller__lockstep=True).seconds > 1.01 * times["t3_mca"]  # bursts meet


FREE = {f"controller__dram__{name}_s": 0.0 for name in ("hop", "trcd", "trp", "tras", "tcl", "trrd", "twr")}
FREE |= {"controller__dram__to_write_s": 0.0, "controller__dram__to_read_s": 0.0, "controller__tccdl_s": 0.0}
FREE |= {"controller__dram__bytes_per_s": 1e15, "controller__cache_hit_s": 0.0, "system__node__hop_latency_s": 0.0}


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(tiles=st.tuples(st.integers(8, 40), st.integers(8, 24)), k=st.integers(512, 4096), gpus=st.sampled_from((4, 8)))
def test_where_memory_costs_nothing_times_are_those_of_tiles_and_links(
    tiles: tuple[int, int], k: int, gpus: int
) -> None:
    """A wave takes its tiles on a CU; a ring sends N - 1 chunks; T3 takes no less than either and no more than both."""
    shape = (128 * tiles[0], 128 * tiles[1], 128 * (k // 128) * gpus)
    tiling = layer("t3", gpus, shape).tiling
    full, left = divmod(tiles[0] * tiles[1], tiling.wave)
    on_busiest = full * tiling.wave // tiling.concurrent + -(-left // tiling.concurrent)
    gemm_s = on_busiest * tiling.tile_s
    ring_s = (gpus - 1) / gpus * tiling.output_bytes / 150e9
    ideal, tracked = (outcome(name, gpus, shape, **FREE) for name in ("t3_ideal_nmc", "t3"))
    assert ideal.gemm_s == pytest.approx(gemm_s, rel=1e-3) == tracked.gemm_s
    assert ideal.reduce_s == pytest.approx(ring_s, rel=2e-3)
    reduced_s = tracked.seconds - ideal.gather_s
    assert max(gemm_s, ring_s) * (1 - 2e-3) <= reduced_s <= (gemm_s + ring_s) * (1 + 2e-3)


@pytest.mark.slow
def test_a_sum_of_the_last_chunk_as_it_comes_in_hides_it() -> None:
    """No later than the transfer's end; the same bytes, and nothing changes near memory."""
    shape = (4096, 2048, 2048)
    for name in ("t3_sequential", "t3_sequential_nmc"):
        last, hidden = (outcome(name, 4, shape, controller__sums_last=last) for last in (True, False))
        sum_s = 0.0 if name.endswith("nmc") else 3 * 4 * 2**20 / 1.024e12  # a chunk is read twice and written
        assert last.traffic == hidden.traffic and last.seconds >= hidden.seconds + 0.8 * sum_s
        assert last.seconds <= hidden.seconds + 2 * sum_s


@pytest.mark.slow
def test_engines_move_what_commands_read_and_not_what_a_gemm_stores() -> None:
    """Of two GPUs none forwards a chunk; of four, slower engines and slower links both tell, and faster links do."""
    shape, slow = (4096, 2048, 2048), {"system__gpu__dma__bytes_per_s": 20e9}
    assert outcome("t3", 2, shape, **slow) == outcome("t3", 2, shape)
    link = "system__node__link_bytes_per_s"
    faster, fast, engines, links = (
        outcome("t3", 4, shape, **over).seconds for over in ({link: 300e9}, {}, slow, {link: 20e9})
    )
    all_gather_s = 3 / 4 * 2 * 4096 * 2048 * (1 / 150e9 - 1 / 300e9)
    assert fast - faster > 1.1 * all_gather_s and fast < engines < links  # of the reduce-scatter a part, too


@pytest.mark.slow
def test_the_threshold_falls_with_the_intensity_of_the_first_stage() -> None:
    """Slow memory fills queues. What the rule takes runs as if it were given."""
    shape, rule = (4096, 2048, 2048), {"controller__threshold": "first_stage"}
    fast, slow, slower = (
        outcome("t3_mca", 4, shape, controller__dram__bytes_per_s=1e12 / part, **rule) for part in (1, 8, 64)
    )
    assert fast.rule == 30 > slower.rule and fast.occupancy < slow.occupancy < slower.occupancy
    by_hand = {"controller__dram__bytes_per_s": 1e12, "schedule__occupancy_threshold": 30}
    assert outcome("t3_mca", 4, shape, **by_hand).seconds == fast.seconds
    path, tree = "schedule.occupancy_threshold", shipped()
    first_stage = {**tree, "controller": {**tree["controller"], "threshold": "first_stage"}}
    assert backend().condition(path, tree) is not None is backend().condition(path, first_stage)


@pytest.mark.slow
def test_a_small_tracker_spills_and_a_large_one_does_not() -> None:
    """Its entries are those of workgroups whose updates are under way, and an eviction brings counts back."""
    shape = (16384, 3072, 3072)
    small, large = (outcome("t3", 8, shape, system__gpu__tracker__num_entries=count) for count in (160, 8192))
    assert small.spills > 100 and large.spills == 0
    assert small.peak_entries <= 160 * 4 < large.peak_entries
    assert small.seconds == pytest.approx(large.seconds, rel=0.05)


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ({"system__node__topology": "mesh"}, "rings"),
        ({"schedule__near_memory": False}, "near_memory"),
        ({"system__gpu__gemm__assignment": "dynamic"}, "static"),
    ],
)
def test_what_requests_do_not_model_is_unsupported(over: dict[str, Any], reason: str) -> None:
    (results,) = backend().evaluate([Batch(point("t3", **over))])
    result: Result = results[0]
    assert result.status == "unsupported" and reason in result.reason


def test_a_controller_is_checked_and_its_knobs_are_known() -> None:
    assert backend().problems(point("t3", controller__bank_groups=3))[0].path == "controller.bank_groups"
    assert backend().problems(point("t3", controller__bank_bits=[8, 9, 12]))[0].path == "controller.bank_bits"
    too_long: dict[str, Any] = {"controller__slices": 3, "controller__cache_line_bytes": 512}
    assert [problem.path for problem in backend().problems(point("t3", **too_long))] == [
        "controller.slices",
        "controller.cache_line_bytes",
    ]
    assert backend().problems(point("t3", controller__sampled_channels=65))[0].path == "controller.sampled_channels"
    tree = shipped()
    assert backend().condition("controller.window_bytes", tree) == {}
    assert backend().condition("schedule.num_chunks", tree) is None
    with pytest.raises(ConfigError, match="controller"):
        backend().sections({**tree, "controller": None})
    bare = {name: value for name, value in tree["controller"].items() if name != "sources"}
    with pytest.raises(ValueError, match="source"):
        Controller.model_validate(bare)


@pytest.mark.nightly
def test_a_narrowed_study_compares_thresholds_and_the_fluid_model_and_judges_nothing(tmp_path: Any) -> None:
    cases = "[megagpt2-tp8-op,megagpt2-tp8-fc2,megagpt2-tp16-op,megagpt2-tp16-fc2]"
    words = [f"output_dir={tmp_path}", "tracking=none", "store=none", "figures=none", f"workload.only={cases}"]
    assert main(["study=t3_requests", *words]) == 0
    outputs = Outputs.latest(tmp_path, "t3_requests")
    table = outputs.read_table("results")
    assert (table["status"] == "ok").all() and (table["tracker_entries"] <= 1024).all()
    beside = outputs.read_table("beside_fluid")
    assert len(beside) == len(table) and beside["gap"].abs().max() < 0.15
    regret = outputs.read_table("thresholds")["regret"]
    assert len(regret) == 4 and (regret >= 0).all() and regret.max() < 0.02
    assert outputs.read_table("traffic").groupby("configuration")["RS reads"].sum()["T3"] > 0
    assert {row["within"] for row in outputs.read_json("claims")} == {None}


@pytest.mark.nightly
def test_the_study_judges_what_t3_published(tmp_path: Any) -> None:
    """Contexts, inputs and models that are not published are not tested; each miss has its cause."""
    words = [f"output_dir={tmp_path}", "tracking=none", "store=none", "figures=none"]
    assert main(["study=t3_requests", *words]) == 0
    rows = {row["id"].partition(".")[2]: row for row in Outputs.latest(tmp_path, "t3_requests").read_json("claims")}
    missed = {name for name, row in rows.items() if row["within"] is False}
    assert missed == {"order", "gemm_read_ratio", "fc_gap", "nmc_adds"}
    assert all(rows[name]["reason"] for name in missed)
    assert {name for name, row in rows.items() if row["within"] is None} == {
        *("ring_validation", "tracker_entries", "tracker_bytes"),
        *("comm_share_large_train", "comm_share_large_prompt", "comm_share_gemm2x"),
        *("in_switch", "cais_over_t3_inf", "cais_over_fused_inf", "cais_over_t3_train", "cais_over_fused_train"),
    }


def test_a_number_of_chunks_is_refused_as_it_would_change_nothing() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.num_chunks = 64: is read by the fluid model alone"):
        plan(request(["study=t3_requests", "schedule.num_chunks=64"]))
