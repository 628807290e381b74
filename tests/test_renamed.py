"""Fields that were renamed: content keys are as before, and a former name is refused with the present one."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from pydantic import BaseModel

import dse
from dse.backend import Batch
from dse.config.compose import request
from dse.content_hash import content_key, content_keys, keys_to_hex
from dse.errors import ConfigError, did_you_mean
from dse.study.plan import plan
from dse.values import Former, Frozen, former_leaf, former_names, knob, moved_to
from tests.support import FAMILIES, design

BEFORE = {  # content keys of shipped schedules under their former names, with today's laws and models of costs
    "uniform_fused_2d": "61715061499f84d5317bfca6cad3a6ba",
    "hetero_unfused_1d": "8e08cae86feb8e39f2c3b847e0951e26",
    "c3_sp": "2f9288183cf171b82d79ec9b40ceb30e",
    "t3_mca": "720deaef99a2a27b58c95043b3cc7db0",
    "go_kernels": "f8f1523bdf81aec44481edb983ec69f1",
    "fused_kernels": "bc105e455cd039d3db402ef182a0cd04",
}


@pytest.mark.parametrize("schedule", BEFORE)
def test_designs_keep_their_content_keys(schedule: str) -> None:
    assert content_key(design(schedule), "overlap") == BEFORE[schedule]


class Old(Frozen):
    mover: str
    size: float = 2.0
    rate: float = 1.0


class New(Frozen):
    engine: Annotated[str, Former("mover", {"kernel": "cu"})]
    bytes: Annotated[float, knob(), Former("size")] = 2.0
    rate: float = 1.0


class OldDesign(Frozen):
    part: Old
    parts: dict[str, Old]
    count: int = 1


class NewDesign(Frozen):
    section: Annotated[New, Former("part")]
    sections: Annotated[dict[str, New], Former("parts")]
    count: int = 1


def test_keys_are_hashes_of_former_names_and_values_wherever_a_field_stands() -> None:
    old = OldDesign(part=Old(mover="cu"), parts={"x": Old(mover="dma", size=3.0)}, count=2)
    new = NewDesign(section=New(engine="kernel"), sections={"x": New(engine="dma", bytes=3.0)}, count=2)
    assert content_key(old, "context") == content_key(new, "context")
    assert content_key(new) != content_key(new.model_copy(update={"section": New(engine="cu2")}))


@pytest.mark.parametrize("path", ["bytes", "rate", "engine"])
def test_axes_count_under_their_former_names(path: str) -> None:
    new = NewDesign(section=New(engine="dma"), sections={})
    values = np.array(["dma", "kernel"]) if path == "engine" else np.array([2.0, 5.0])
    keys = content_keys(new, {f"section.{path}": values})
    single = [content_key(Batch(new, {f"section.{path}": values}).at(place)) for place in range(2)]
    assert [key.decode() for key in keys_to_hex(keys)] == single
    assert former_leaf(new, f"section.{path}")[0] == f"part.{ {'bytes': 'size', 'engine': 'mover'}.get(path, path) }"


def test_a_former_name_is_told_only_where_the_new_one_is_possible() -> None:
    assert did_you_mean("mover", ["engine", "bytes"]) == "it is `engine` now, 'kernel' for 'cu'"
    assert did_you_mean("mover", ["latency"]) == "known here: latency"


SWEEP = "study=ficco_sweep"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([SWEEP, "schedule.mover=dma"], "schedule.mover: is not a known key (it is `comm_engine` now)"),
        ([SWEEP, "schedule=hetero_fused_1d", "schedule.start=hetero"], "`local_shard_first` now, False for 'uniform'"),
        ([SWEEP, "space.schedule.granularity=choice(2,4)"], "space.schedule.granularity: is no knob of any design"),
        ([SWEEP, "space.schedule.granularity=choice(2,4)"], "it is `num_chunks` now"),
        (["study=fused_ops", "space.schedule.order=choice(remote_first)"], "it is `issue_order` now"),
        (["study=conccl", "schedule=c3_sp", "schedule.order=comm_first"], "it is `launch_order` now"),
    ],
)
def test_a_former_key_is_refused_with_its_present_name(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(request(words))
    assert told in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["setting=cus_16"], "setting: is not a known key (its values are `system.gpu.active_cus`, `system.gpu.clock`"),
        (["setting.num_cus=16"], "setting.num_cus: is not a known key (it is `system.gpu.active_cus` now)"),
        (["setting.feed=0.5"], "it is `system.gpu.disabled_cache` now"),
        (["space.setting.flop_vs_bw=choice(1,2)"], "is no knob of any design here (it is `system.gpu.flop_vs_bw` now)"),
        (["study.baseline={setting.flop_vs_bw: 1}"], "setting.flop_vs_bw is no knob of any design here (it is `system"),
        (["study.baseline={setting.name: full}"], "names no option of setting (it is `system.name` now)"),
        (["+setting={clock: 1}"], "setting: is not a known section (its values are `system.gpu.active_cus`"),
    ],
)
def test_a_value_that_moved_to_another_section_is_refused_with_its_present_path(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(request(["study=comp_vs_comm", *words]))
    assert told in str(error.value)


def test_a_present_path_is_told_of_no_other_place() -> None:
    assert moved_to("system.gpu.clock") == moved_to("system") == moved_to("run.batch") == ""
    assert moved_to("setting.clock") == "it is `system.gpu.clock` now"


def test_every_renamed_field_of_a_schedule_has_a_name_of_its_own() -> None:
    kinds: dict[str, type[BaseModel]] = FAMILIES
    renamed = {name: former_names(kind) for name, kind in kinds.items()}
    assert {"comm_engine", "num_chunks", "chunk_dim", "local_shard_first"} <= set(renamed["chunked"])
    for name, formers in renamed.items():
        taken = set(kinds[name].model_fields) & {former.name for former in formers.values()}
        assert not taken, f"{name}: {taken} would be two fields in content keys"


def test_a_former_key_in_a_file_is_refused_with_its_present_name() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.slices.*it is `num_chunks` now"):
        design("fused_kernels", {"schedule.slices": 8})


MOVED = dict(
    line.split(",") for line in (Path(dse.__file__).parent / "moved_modules.csv").read_text("utf-8").splitlines()[2:]
)


@pytest.mark.parametrize("former", ["dse.problems", "dse.discovery", "simulators.gemm", "simulators.fluid"])
def test_a_former_module_says_where_it_went(former: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{former} is {MOVED[former]} now".replace(".", r"\.")):
        importlib.import_module(former)


def test_moved_modules_are_gone_and_are_where_the_table_says() -> None:
    assert len(MOVED) > 90
    for former, present in MOVED.items():
        assert importlib.util.find_spec(present) is not None
        assert not (Path(dse.__file__).parents[1] / f"{former.replace('.', '/')}.py").exists()


def test_modules_that_never_were_are_not_found_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'dse\.never'"):
        importlib.import_module("dse.never")
