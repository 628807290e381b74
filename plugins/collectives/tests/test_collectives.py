"""Collectives alone: schedules deliver every byte once, engines agree on them, and files read back as written."""

from __future__ import annotations

import functools
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import collective_schedules
from dse.cli import main
from dse.errors import ConfigError
from dse_collectives.command import machine_of
from dse_collectives.explicit import COLLECTIVES, Collective, CollectiveSchedule, Message, check_schedule
from dse_collectives.msccl import schedule_of_xml, xml_of
from dse_collectives.packing import cheapest_tree, crossing_rate
from dse_collectives.replay import replay_schedule, seconds
from dse_collectives.schedule_files import read_schedule, schedule_of_yaml, yaml_of
from dse_collectives.synthesis import Synthesiser, round_shares
from dse_collectives.topology import topology_of
from simulators.costs.collective import collective_cost
from simulators.costs.transfer import TransferMode, alone
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.hardware.schedule_system import ScheduleSystem, links_of
from simulators.steps.spread.groups import groups
from simulators.workloads.model import Parallel

FABRICS = {
    "mesh": ("mi300x_8", ()),
    "ring": ("v100_8", ()),
    "switch": ("h100_8", ()),
    "six on PCIe": ("l40s_8", ("system.node.num_gpus=6",)),
    "two nodes": ("mi210_16x4", ("system.fabric.num_nodes=2",)),
    "two nodes of one NIC": ("mi210_16x4", ("system.fabric.num_nodes=2", "system.fabric.nic.num_nics=1")),
    "fat tree of rings": (
        "mi210_16x4",
        (
            "system.fabric.num_nodes=2",
            "system.fabric.network.topology=fat_tree",
            "system.node.topology=ring",
            "system.fabric.nic.placement=cpu",
        ),
    ),
}
LARGE = 2.0**28
EVERYWHERE = pytest.mark.parametrize("fabric", FABRICS)


@functools.cache
def maker(fabric: str, collective: Collective) -> Synthesiser:
    """The synthesiser of a collective on a fabric."""
    name, words = FABRICS[fabric]
    return Synthesiser(collective, topology_of(machine_of(name, words)))


def schedules(fabric: str, collective: Collective) -> list[CollectiveSchedule]:
    """Schedules of libraries, and synthesised ones."""
    synthesiser = maker(fabric, collective)
    return [*synthesiser.library.values(), synthesiser.pipeline(1), synthesiser.pipeline(3)]


# Every byte, once


@pytest.mark.one_in(30, 5)
@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "collective"), list(product(FABRICS, COLLECTIVES)))
def test_a_schedule_delivers_every_byte_once_on_every_engine_and_reads_back(
    fabric: str, collective: Collective
) -> None:
    topology, exact = maker(fabric, collective).topology, 0
    for schedule in schedules(fabric, collective):
        assert check_schedule(schedule) is schedule
        assert schedule_of_yaml(yaml_of(schedule)) == schedule
        assert schedule_of_xml(xml_of(schedule)) == schedule
        plain = re.sub(r' msg="\d+"', "", xml_of(schedule))  # as other programs write it
        assert check_schedule(schedule_of_xml(plain)).collective == collective
    for schedule in schedules(fabric, collective)[:-1]:
        runs = [replay_schedule(schedule, topology, 2.0**22, engine) for engine in ("fluid", "event", "analytic")]
        exact += not runs[2].reason(0)
        agreeing = runs if not runs[2].reason(0) else runs[:2]
        for run in agreeing:
            np.testing.assert_allclose(run.finished, runs[0].finished, rtol=1e-9)
    assert exact >= (3 if fabric in ("mesh", "ring") else 0)  # no port of these is shared


DRAWN = st.tuples(st.sampled_from(list(FABRICS)), st.sampled_from(COLLECTIVES), st.integers(0, 9), st.randoms())


@pytest.mark.slow
@given(DRAWN)
def test_a_schedule_that_loses_a_message_is_refused_with_the_chunk(drawn: tuple[str, Collective, int, object]) -> None:
    fabric, collective, which, random = drawn
    schedule = (choices := schedules(fabric, collective))[which % len(choices)]
    place = random.randrange(len(schedule.messages))  # type: ignore[attr-defined]
    lost = schedule.messages[place]
    left = replace(schedule, messages=schedule.messages[:place] + schedule.messages[place + 1 :])
    with pytest.raises(ConfigError, match=r"block \d+.* is (lost|sent before it is there)") as refused:
        check_schedule(left)
    assert any(str(schedule.chunks[chunk]) in str(refused.value) for chunk in lost.chunks)


@pytest.mark.slow
@given(DRAWN)
def test_a_schedule_that_doubles_a_message_is_refused_with_the_chunk(
    drawn: tuple[str, Collective, int, object],
) -> None:
    fabric, collective, which, random = drawn
    schedule = (choices := schedules(fabric, collective))[which % len(choices)]
    place = random.randrange(len(schedule.messages))  # type: ignore[attr-defined]
    again = schedule.messages[place]
    doubled = replace(schedule, messages=(*schedule.messages[: place + 1], again, *schedule.messages[place + 1 :]))
    with pytest.raises(ConfigError, match="is doubled") as refused:
        check_schedule(doubled)
    assert str(schedule.chunks[again.chunks[0]]) in str(refused.value)


@given(DRAWN)
def test_a_schedule_whose_chunks_lose_or_share_units_is_refused(drawn: tuple[str, Collective, int, object]) -> None:
    fabric, collective, which, random = drawn
    schedule = (choices := schedules(fabric, collective))[which % len(choices)]
    place = random.randrange(len(schedule.chunks))  # type: ignore[attr-defined]
    chunks = list(schedule.chunks)
    chunks[place] = replace(chunks[place], start=chunks[place].start + 1)
    with pytest.raises(ConfigError, match=rf"block {chunks[place].block}\b.* is (lost|doubled|past the end)"):
        check_schedule(replace(schedule, chunks=tuple(chunks)))


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (Message(1, 2, (0,)), "sent before it is there"),
        (Message(0, 0, (0,)), "needs two of 8 GPUs"),
        (Message(0, 9, (0,)), "needs two of 8 GPUs"),
        (Message(0, 1, (99,)), "a chunk that is not in the list"),
        (Message(0, 1, (0,), reduces=True), "is doubled"),
    ],
)
def test_a_wrong_message_is_refused(message: Message, part: str) -> None:
    schedule = maker("mesh", "all_gather").library["direct"]
    first = () if part != "is doubled" else schedule.messages
    with pytest.raises(ConfigError, match=part):
        check_schedule(replace(schedule, messages=(*first, message, *schedule.messages)))


def test_a_copy_over_a_sum_is_refused() -> None:
    schedule = maker("mesh", "reduce_scatter").library["direct"]
    copies = tuple(replace(message, reduces=False) for message in schedule.messages)
    with pytest.raises(ConfigError, match="is lost: the copy replaces the contribution of GPU"):
        check_schedule(replace(schedule, messages=copies))


@pytest.mark.more
@pytest.mark.slow
def test_relays_have_the_room_that_they_are_given() -> None:
    ring = maker("ring", "all_to_all").library["direct"]
    assert ring.relayed_share(0) > 0
    with pytest.raises(ConfigError, match=r"GPU 0 relays .* and has room for 0"):
        check_schedule(ring, relay_share=0.0)
    nodes = maker("two nodes", "all_to_all")
    narrow = Synthesiser("all_to_all", nodes.topology, relay_share=0.0)
    assert nodes.synthesise(LARGE).schedule.relayed_share(0) > 0
    assert narrow.synthesise(LARGE).schedule.relayed_share(0) == 0
    with pytest.raises(ConfigError, match="relay_bytes"):
        Synthesiser("all_to_all", maker("ring", "all_to_all").topology, relay_share=0.0).synthesise(LARGE)


# Engines


def test_a_message_takes_its_link_for_its_bytes_and_arrives_a_latency_later() -> None:
    topology = maker("mesh", "all_gather").topology
    link = topology.by_ends[0, 1]
    rate = topology.ports["link 0-1"]
    direct = maker("mesh", "all_gather").library["direct"]
    assert seconds(direct, topology, 2.0**20)[0] == pytest.approx(2.0**17 / rate + link.latency_s, rel=1e-12)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_whatever_moves_data_by_pcie_passes_the_bridges_that_the_library_was_measured_on(gpus: int) -> None:
    system = links_of(ScheduleSystem.of(tree_of("l40s_8")), gpus)
    library, *copies = (alone(system, LARGE, by=TransferMode(by, 24, "all_gather")) for by in ("cu", "dma", "store"))
    assert all(0.7 * library < copy for copy in copies)
    measured = LARGE * (gpus - 1) / gpus / library
    assert max(topology_of(system).ports.values()) < 1.5 * measured


@pytest.mark.parametrize("name", ["mi300x_8_roce", "mi210_4", "v100_8", "h100_8_ndr", "gb200_72"])
def test_a_message_takes_one_link_where_pairs_have_their_own_and_one_nic(name: str) -> None:
    machine = Device.of(tree_of(name))
    node: Any = machine.node
    inside, across = (groups(machine, Parallel(cp=gpus))["cp"] for gpus in (node.num_gpus, 4 * node.num_gpus))
    most: Any = node.link_bytes_per_s if node.topology in ("mesh", "ring") else inside.bytes_per_s
    network = node.library.network_bytes_per_s
    for group, rate in [(inside, most), *([] if network is None else [(across, min(most, network))])]:
        seconds = collective_cost("send_recv", "ring", LARGE, group).seconds
        assert 0.95 * rate < LARGE / seconds <= rate


def test_a_schedule_for_other_links_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no link on v100_8"):
        seconds(maker("mesh", "all_gather").library["direct"], maker("ring", "all_gather").topology, 1e6)
    with pytest.raises(ConfigError, match="is for 8 GPUs, where l40s_8 has 6"):
        seconds(maker("mesh", "all_gather").library["direct"], maker("six on PCIe", "all_gather").topology, 1e6)


# Bounds


@pytest.mark.more
@pytest.mark.one_in(4, 1)
@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "collective"), list(product(FABRICS, COLLECTIVES)))
def test_no_schedule_is_below_the_bound_and_the_synthesised_one_is_the_fastest(
    fabric: str, collective: Collective
) -> None:
    synthesiser, sizes = maker(fabric, collective), (256.0, 2.0**18, LARGE)
    fastest = np.array([timed.seconds for timed in synthesiser.synthesise_sizes(sizes)])
    library = np.array([seconds(schedule, synthesiser.topology, sizes) for schedule in synthesiser.library.values()])
    bounds = np.array([synthesiser.bound(size).seconds for size in sizes])
    assert (fastest <= library.min(axis=0)).all()
    assert (np.vstack([fastest, library]) >= bounds * (1 - 1e-9)).all()
    most = 1.06 if fabric == "fat tree of rings" else 1.02  # links that share a NIC do not share it as it is best
    assert fastest[-1] <= most * bounds[-1]


@pytest.mark.parametrize(("fabric", "links"), [("mesh", 7), ("ring", 2), ("switch", 7)])
def test_bounds_are_those_of_the_literature(fabric: str, links: int) -> None:
    """All-gather: V (n - 1) / n over the rate of a GPU; all-reduce: twice that (Patarasuk and Yuan)."""
    topology = maker(fabric, "all_gather").topology
    late = min(link.latency_s for link in topology.links)
    inward = min(topology.ports.values()) * (1 if fabric == "switch" else links)
    once = LARGE * 7 / 8 / inward
    for collective in COLLECTIVES[:3]:
        times = 2 if collective == "all_reduce" else 1
        bound = maker(fabric, collective).bound(LARGE)
        assert bound.bandwidth_s - late == pytest.approx(times * once, rel=1e-6)


def test_the_rate_between_parts_is_that_of_the_ports_between_them() -> None:
    topology = maker("two nodes of one NIC", "all_gather").topology
    assert crossing_rate(topology, [0] * 4 + [1] * 4) == pytest.approx(2 * topology.ports["nic 0.0 out"])


@given(st.integers(3, 6), st.integers(0, 2**32 - 1))
def test_the_cheapest_tree_is_that_of_all_trees(n: int, seed: int) -> None:
    cost = np.random.default_rng(seed).integers(0, 6, (n, n)).astype(float)
    parents = cheapest_tree(cost, 0)
    assert sum(cost[parent, v] for v, parent in parents.items()) == min(
        sum(cost[parent, v] for v, parent in enumerate(choice, 1)) for choice in all_trees(n)
    )


@functools.cache
def all_trees(n: int) -> list[tuple[int, ...]]:
    """Parents of vertices 1 .. n - 1 in every tree from vertex 0."""

    def reaches(choice: tuple[int, ...], vertex: int) -> bool:
        for _ in range(n):
            vertex = choice[vertex - 1] if vertex else 0
        return vertex == 0

    choices = np.stack(np.meshgrid(*[range(n)] * (n - 1), indexing="ij"), -1).reshape(-1, n - 1).tolist()
    return [tuple(choice) for choice in choices if all(reaches(tuple(choice), v) for v in range(1, n))]


@EVERYWHERE
def test_rounded_shares_are_whole_blocks(fabric: str) -> None:
    units, counts = round_shares(maker(fabric, "all_gather").routing)
    assert all(sum(count for _, count in routes) == units for routes in counts.values())


# Files


RING_OF_TWO = """
<algo name="by hand" nchunksperloop="2" nchannels="1" proto="LL" ngpus="2" coll="allreduce" inplace="1">
 <gpu id="0" i_chunks="2" o_chunks="2" s_chunks="0"><tb id="0" send="1" recv="1" chan="0">
  <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
  <step s="1" type="rrcs" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
  <step s="2" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
 </tb></gpu>
 <gpu id="1" i_chunks="2" o_chunks="2" s_chunks="0"><tb id="0" send="0" recv="0" chan="0">
  <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
  <step s="1" type="rrcs" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
  <step s="2" type="r" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
 </tb></gpu>
</algo>
"""


def test_an_algorithm_of_msccl_is_understood() -> None:
    schedule = check_schedule(schedule_of_xml(RING_OF_TWO))
    assert [(message.source, message.reduces) for message in schedule.messages].count((0, True)) == 1
    assert len(schedule.messages) == 4


Step = tuple[str, str, int, str, int, int]
"""Type, source buffer and offset, target buffer and offset, count."""


def algorithm(chunks: int, threads: list[dict[int, list[Step]]], *, in_place: bool = True) -> str:
    """XML of an all-reduce as msccl-tools write it. threads: for each GPU, peer -> steps (-1: local ones, last)."""
    text = f'<algo name="made" nchunksperloop="{chunks}" nchannels="1" proto="LL" ngpus="{len(threads)}"'
    text += f' coll="allreduce" inplace="{int(in_place)}" outofplace="{int(not in_place)}">'
    for gpu, blocks in enumerate(threads):
        text += f'<gpu id="{gpu}" i_chunks="{chunks}" o_chunks="{chunks}" s_chunks="{chunks * len(threads)}">'
        peers = list(blocks)
        for number, (peer, steps) in enumerate(blocks.items()):
            text += f'<tb id="{number}" send="{peer}" recv="{peer}" chan="0">'
            rows = [(*step, -1, -1) for step in steps]
            if peer < 0:  # after all that the others have received
                rows = [("nop", "i", -1, "o", -1, 0, peers.index(other), 1) for other in peers if other >= 0] + rows
            for place, (kind, *ends, count, depid, deps) in enumerate(rows):
                names = ("srcbuf", "srcoff", "dstbuf", "dstoff")
                buffers = " ".join(f'{name}="{end}"' for name, end in zip(names, ends, strict=True))
                text += f'<step s="{place}" type="{kind}" {buffers} cnt="{count}" depid="{depid}" deps="{deps}"/>'
            text += "</tb>"
        text += "</gpu>"
    return text + "</algo>"


def all_pairs(n: int, parts: int, *, in_place: bool = True, chain: bool = False) -> str:
    """All peers' tensors into scratch, and then added one by one, or to one another and only then to the own one."""
    threads, to = list[dict[int, list[Step]]](), "i" if in_place else "o"
    for gpu in range(n):
        peers = [peer for peer in range(n) if peer != gpu]
        blocks: dict[int, list[Step]] = {
            peer: [("s", "i", 0, "s", 0, parts), ("r", "i", 0, "s", place * parts, parts)]
            for place, peer in enumerate(peers)
        }
        ends = [("s", 0)] * (n - 2) + [(to, 0)] if chain else [(to, 0)] * (n - 1)
        order = [*range(1, n - 1), 0] if chain else list(range(n - 1))
        blocks[-1] = [] if in_place else [("cpy", "i", 0, "o", 0, parts)]
        blocks[-1] += [("re", "s", parts * k, *end, parts) for k, end in zip(order, ends, strict=True)]
        threads.append(blocks)
    return algorithm(parts, threads, in_place=in_place)


def doubling(n: int) -> str:
    """Partners exchange all that they have in each round, into scratch, and add it: partial sums go both ways."""
    rounds, threads = n.bit_length() - 1, list[dict[int, list[Step]]]()
    for gpu in range(n):
        blocks = {
            gpu ^ 1 << k: [("s", "i", 0, "s", 0, n), ("r", "i", 0, "s", k * n, n), ("re", "s", k * n, "i", 0, n)]
            for k in range(rounds)
        }
        threads.append(blocks)
    text = algorithm(n, threads)
    for k in range(1, rounds):  # a round begins when the sum of the one before is there
        block = f'<tb id="{k}" '
        parts = text.split(block)
        first = 'depid="-1" deps="-1"'
        text = block.join([parts[0], *(part.replace(first, f'depid="{k - 1}" deps="2"', 1) for part in parts[1:])])
    return text


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 8, 24])
@pytest.mark.parametrize(("in_place", "chain"), list(product([True, False], repeat=2)))
def test_partial_sums_in_scratch_are_a_proven_schedule_as_fast_as_the_same_messages_alone(
    parts: int, in_place: bool, chain: bool
) -> None:
    topology, sizes = maker("mesh", "all_reduce").topology, [2.0**16, 2.0**23]
    schedule = check_schedule(schedule_of_xml(all_pairs(8, parts, in_place=in_place, chain=chain)))
    library = maker("mesh", "all_reduce").library["one_shot"]
    assert sum(not message.is_local for message in schedule.messages) == len(library.messages)
    times = seconds(schedule, topology, sizes)
    assert times == pytest.approx(seconds(library, topology, sizes), rel=1e-12)
    for again in (schedule_of_yaml(yaml_of(schedule)), schedule_of_xml(xml_of(schedule))):
        assert seconds(check_schedule(again), topology, sizes) == pytest.approx(times, rel=1e-12)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_partners_that_exchange_partial_sums_both_ways_are_a_proven_schedule(n: int) -> None:
    schedule = check_schedule(schedule_of_xml(doubling(n)))
    sent = [message for message in schedule.messages if not message.is_local]
    assert len(sent) == n * (n.bit_length() - 1)
    again = check_schedule(schedule_of_xml(xml_of(schedule)))
    assert [message for message in again.messages if not message.is_local] == sent


@given(st.integers(2, 6), st.booleans(), st.booleans(), st.integers(0, 10**6), st.sampled_from(["lacks", "doubled"]))
def test_a_sum_that_a_gpu_forgets_or_repeats_is_named(
    n: int, in_place: bool, chain: bool, place: int, way: str
) -> None:
    text = all_pairs(n, n, in_place=in_place, chain=chain and n > 2)
    sums = [match.span() for match in re.finditer(r'<step s="\d+" type="re"[^>]*/>', text)]
    start, end = sums[place % len(sums)]
    changed = text[:start] + ("" if way == "lacks" else 2 * text[start:end]) + text[end:]
    with pytest.raises(ConfigError, match=r"block \d+ \[0, 1\) is (lost: o\[\d+\] .* lacks the contribution|doubled)"):
        check_schedule(schedule_of_xml(changed))


@pytest.mark.parametrize(("steps", "verb"), [(2, "has"), (300, "has"), (0, "moves")])
def test_units_are_counted_before_they_are_made(steps: int, verb: str) -> None:
    units = 2**19 if steps else 2**10
    copies: list[Step] = [("cpy", "i", 0, "s", place % 3, units - 1) for place in range(steps or 300)]
    text = algorithm(units, [{1: copies}, {0: copies}])
    tracemalloc.start()
    with pytest.raises(ConfigError, match=rf"{verb} [\d,]+ units in all, and 262,144 are the most"):
        schedule_of_xml(text)
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()


def test_whole_blocks_of_many_units_are_moved_as_few() -> None:
    half = 2**26
    block: list[Step] = [
        ("s", "i", 0, "s", 0, 2 * half),
        ("r", "i", 0, "s", 0, 2 * half),
        ("re", "s", 0, "i", 0, 2 * half),
    ]
    schedule = check_schedule(schedule_of_xml(algorithm(2 * half, [{1: block}, {0: block}])))
    assert (schedule.units, [chunk.count for chunk in schedule.chunks]) == (half, [half, half])


Change = Callable[[str], str]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda text: text.replace('"rrcs"', '"rcs"'), "is lost"),
        (lambda text: text.replace('type="s" srcbuf="i" srcoff="1"', 'type="s" srcbuf="i" srcoff="0"'), "adds block 0"),
        (lambda text: text.replace('<step s="0" type="s"', '<step s="0" type="nop"'), "deadlocks: GPU 0 step 1"),
        (lambda text: text.replace('srcbuf="i" srcoff="0"', 'srcbuf="s" srcoff="0"'), "which nothing has filled"),
        (lambda text: text.replace('cnt="1"', 'cnt="many"', 1), "is no number: 'many'"),
        (lambda text: text.replace('depid="-1"', 'depid="7"', 1), "waits for threadblock 7"),
        (lambda text: text.replace("rrcs", "jump"), "a step of type 'jump'"),
        (lambda text: text.replace("allreduce", "broadcast"), "is no <algo>"),
        (lambda text: text.replace('cnt="1"', 'cnt="--1"', 1), "is no number: '--1'"),
        (
            lambda text: text.replace(
                'type="r" srcbuf="i" srcoff="0" dstbuf="i"', 'type="r" srcbuf="i" srcoff="0" dstbuf="s"'
            ),
            "GPU 0 has a step of r to s[0], and s_chunks of it are 0",
        ),
        (lambda text: text.replace('<gpu id="1"', '<gpu id="0"'), "has two <gpu> with one id"),
        (lambda text: text.replace('<gpu id="1"', '<gpu id="2"'), "has no <gpu> for each of 2 GPUs"),
        (lambda text: text.replace("<algo", "<algorithm").replace("</algo", "</algorithm"), "is no <algo>"),
        (lambda text: text.replace('ngpus="2"', 'ngpus="1"'), "needs 2 to"),
        (lambda text: text.replace("allreduce", "allgather").replace('loop="2"', 'loop="3"'), "needs a multiple"),
        (lambda text: text.replace('cnt="1"', 'cnt="0"', 1), "has a step of 0 units"),
        (lambda text: text.replace('cnt="1"', 'cnt="2"', 1), "units from GPU"),
        (lambda text: text.replace('srcbuf="i" srcoff="0"', 'srcbuf="x" srcoff="0"'), "which is in no buffer"),
        (lambda text: text.replace('loop="2"', 'loop="900000"'), "has 1,800,000 units in all"),
        (lambda text: text[:200], "is no XML"),
        (lambda text: '<!DOCTYPE a [<!ENTITY b "c">]>' + text, "declarations"),
    ],
)
def test_a_wrong_algorithm_of_msccl_is_refused_in_a_sentence(change: Change, part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)) as refused:
        check_schedule(schedule_of_xml(change(RING_OF_TWO), "mine.xml"))
    for problem in refused.value.problems:
        assert (problem.path, problem.value) == ("schedule", "mine.xml")
        assert problem.way_out


@given(st.sampled_from(COLLECTIVES), st.integers(0, 10**6), st.sampled_from(["0", "1", "-1", "9", "s", "rrc", "cpy"]))
def test_damaged_xml_is_a_proven_schedule_or_refused(collective: Collective, place: int, value: str) -> None:
    text = xml_of(maker("two nodes", collective).pipeline(1))
    values = [match.span(1) for match in re.finditer(r'"([^"]*)"', text)]
    start, end = values[place % len(values)]
    try:
        checked = check_schedule(schedule_of_xml(text[:start] + value + text[end:]))
    except ConfigError as error:
        assert "schedule" in str(error)
    else:
        assert checked.collective in COLLECTIVES


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda text: text.replace("- 0 from 0 to 1\n", ""), "block 0 [0, 1) is lost: it never reaches GPU 1"),
        (lambda text: text.replace("- 0 from 0 to 1\n", "- 0 from 0 to 1\n" * 2), "block 0 [0, 1) is doubled"),
        (lambda text: text.replace("- 0 from 0 to 1\n", "- 0 to 1\n"), "schedule.messages.0"),
        (lambda text: text.replace("- block 3 [0, 1)\n", "- block 3\n"), "schedule.chunks.3"),
        (lambda text: text.replace("all_gather", "gather"), "schedule.collective"),
        (lambda _: "a: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(change: Change, part: str, tmp_path: Path) -> None:
    text = yaml_of(maker("mesh", "all_gather").library["direct"])
    assert change(text) != text
    (tmp_path / "schedule.yaml").write_text(change(text), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(part)):
        read_schedule(tmp_path / "schedule.yaml")


# The command


@pytest.mark.nightly
def test_the_command_compares_writes_and_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["machine", "collective", "system=mi210_16x4", "system.fabric.num_nodes=2", "bytes=1MiB"]
    assert main([*words, "pattern=all_gather", "out=made"]) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("synthesised", "hierarchical", "bound: ", "replayed by engines: fluid"))
    names = {path.name for path in Path("made").rglob("*") if path.is_file()}
    assert names >= {"schedule.yaml", "schedule.xml", "algorithms.parquet", "timeline.json", "bus_bandwidth.png"}
    for kind in ("yaml", "xml"):
        assert main([*words, f"schedule=made/schedule.{kind}", "out=again"]) == 0
        assert "from the file" in capsys.readouterr().out
        assert Path(f"made/schedule.{kind}").read_bytes() == Path(f"again/schedule.{kind}").read_bytes()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["pattern=all_gather", "system=mi50"], "system.node.topology"),
        (["pattern=all_gather", "system=dlrm_torus"], "system.node.num_gpus"),
        (["pattern=all_gather", "system.fabric.num_nodes=2"], "is no value of mi300x_8"),
        (["pattern=all_gather", "bytes=0 B"], "is nothing to send"),
        (["pattern=all_gather", "bytes=fast"], "bytes = 'fast'"),
        (["pattern=broadcast"], "pattern = 'broadcast'"),
        (["bytes=1MiB"], "pattern: is missing"),
        (["schedule=absent.yaml"], "is no file"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_refused(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "collective", *words]) == 2
    assert part in capsys.readouterr().err


# The reach


@pytest.mark.nightly
def test_synthesised_schedules_are_near_the_bound_and_never_slower() -> None:
    reached = collective_schedules.measure()
    assert reached["collective_gap_worst"] <= 0.02
    assert reached["small_slower"] == 0


# Moves of an overlap schedule

STEPS = """
parts: 8
cuts: [0, 1, 4, 8]
kernels: [16]
steps:
- {move: [0, 2]}
- {local: [0, 3]}
- {move: [2, 3], kernel: 0, peers: [7, 1, 2], after: 1}
- {move: [2, 3], peers: [6, 5, 4, 3]}
- {compute: [0, 3]}
"""


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("topology", ["mesh", "ring"])
def test_moves_of_an_overlap_schedule_are_a_proven_collective(
    topology: str, collective: Collective, tmp_path: Path
) -> None:
    node = machine_of("mi300x_8", [f"system.node.topology={topology}"]).node
    path, text = tmp_path / "mine.yaml", STEPS
    if (topology, collective) == ("ring", "reduce_scatter"):  # sums are passed on: what comes from afar goes first
        text = text.replace("[7, 1, 2]", "[6, 5, 4, 3]", 1).replace(
            "peers: [6, 5, 4, 3]}\n- {c", "peers: [7, 1, 2]}\n- {c"
        )
    path.write_text(text)
    read = read_schedule(path, node, collective)
    assert read.units == (16 if topology == "ring" else 8)
    links = topology_of(machine_of("mi300x_8", [f"system.node.topology={topology}"])).by_ends
    assert all((message.source, message.target) in links for message in read.messages)
    again = check_schedule(schedule_of_xml(xml_of(read)))
    assert len(again.messages) == len(read.messages)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (("- {move: [0, 2]}", "- {move: [0, 1]}"), "block 0 [1, 4) is lost: it never reaches GPU 1"),
        (("move: [0, 2]", "move: [0, 3]"), "[4, 8) is doubled"),
        (("cuts: [0", "cuts: [zero"), "schedule.cuts.0"),
    ],
)
def test_moves_that_lose_or_double_a_byte_are_refused(change: tuple[str, str], part: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(STEPS.replace(*change))
    with pytest.raises(ConfigError, match=re.escape(part)):
        read_schedule(path, machine_of("mi300x_8", []).node, "all_gather")


def test_steps_need_the_name_of_a_collective(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(STEPS)
    node = machine_of("mi300x_8", []).node
    with pytest.raises(ConfigError, match="which collective the steps are of"):
        read_schedule(path, node)
    with pytest.raises(ConfigError, match="both ways at once"):
        read_schedule(path, node, "all_reduce")
