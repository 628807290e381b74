"""The backend of `study=gpgpusim`: kernels in PTX that run, timed on the SMs of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from dse.backend import Backend, Batch, Metric, Result, Results, Tree
from dse.errors import ConfigError, Problem, Problems, validate_as
from dse.values import Frozen
from dse.values.units import Integer
from dse_ptx.networks import WORKS, TimedLaunch, timed_launches
from dse_ptx.phases import camping_factor, phases_of
from dse_ptx.sms import sm_array

Algorithm = Literal["direct", "implicit_gemm", "fft", "winograd"]


class SmChoice(Frozen):
    """The GPU whose SMs are described (`dse_ptx/sms`), and how its memory spreads over channels."""

    gpu: str
    channel_hash: Literal["none", "xor"]


class Work(Frozen):
    """Kernels that run: `kernels` of `dse_ptx.networks.WORKS`, by an algorithm of convolutions, on so many images."""

    kernels: Literal["lenet", "conv1", "conv2", "transposed"]
    algorithm: Algorithm
    images: Annotated[Integer, Field(ge=1, le=256)]


class SmRun(Frozen):
    """A work on the SMs of a GPU."""

    sms: SmChoice
    work: Work

    @property
    def launches(self) -> tuple[TimedLaunch, ...]:
        """Its launches with their times. Raises ConfigError where a block does not fit on an SM."""
        work = self.work
        return timed_launches(work.kernels, work.algorithm, work.images, self.sms.gpu, self.sms.channel_hash)


class SmsBackend(Backend):
    """Designs one by one; each takes seconds."""

    version = "3"
    metrics: Mapping[str, Metric] = {
        "time_s": Metric("s", "of all kernels with their launches"),
        "launch_share": Metric("fraction", "of the time in launches", high=1.0),
        "ipc": Metric("", "warp instructions of an SM in a cycle, of all launches", "maximize"),
        "issued": Metric("fraction", "of the slots of schedulers that issue", "maximize", high=1.0),
        "dram_bytes": Metric("B", "that DRAM reads and writes"),
        "bandwidth_share": Metric("fraction", "dram_bytes over time without launches at the peak rate", high=1.0),
        "l1_hit_rate": Metric("fraction", "sectors that L1 holds, of those that look into it", "maximize", high=1.0),
        "camping": Metric("x", "the busiest channel's lines over the mean's, launches weighed by their lines", low=1.0),
        "phases": Metric("", "stretches that differ in instructions, requests at L2 or bandwidth", low=1.0),
        "kernels": Metric("", "launched"),
    }

    def sections(self, tree: Tree) -> None:
        """Check that sections are known."""
        check = Problems()
        for name in set(tree) - {"sms", "work", "works"}:
            check.add(name, "is not a known section", way_out="sections are sms, work and works")
        names = tree.get("works") or []
        unknown = [name for name in names if name not in WORKS] if isinstance(names, Sequence) else [names]
        # a name alone is a sequence too, of letters
        if unknown or isinstance(names, str):
            check.add("works", "must list names of works", value=names, way_out=f"works={list(WORKS)}".replace("'", ""))
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """A scenario for each of `works`, or the work of the configuration."""
        base = {name: tree[name] for name in ("sms", "work")}
        names = tree.get("works") or [tree["work"]["kernels"]]
        return {str(name): {**base, "work": {**tree["work"], "kernels": name}} for name in names}

    def design(self, tree: Tree) -> SmRun:
        """A validated design. Raises ConfigError with every problem."""
        design = validate_as(SmRun, tree, path="")
        # refuses a GPU without SMs before anything runs
        sm_array(design.sms.gpu)
        return design

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """None: what does not fit on an SM is refused where it runs."""
        return ()

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Execute and time each design."""
        return [Results.of([_result(design) for design in batch.designs()]) for batch in batches]

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the SMs with their sources."""
        assert isinstance(design, SmRun)
        return list(sm_array(design.sms.gpu).facts_below("sms"))


def _result(design: BaseModel) -> Result:
    # what does not fit on an SM is a property of the design, and no failure of the run
    assert isinstance(design, SmRun)
    try:
        return Result("ok", measured(design.launches), engine="ptx")
    except ConfigError as error:
        return Result("unsupported", reason=str(error))


def measured(launches: Sequence[TimedLaunch]) -> dict[str, float]:
    """Every metric of launches that run one after another."""
    times = [launch.time for launch in launches]
    machine, total_s = times[0].machine, sum(done.seconds for done in times)
    launch_s = sum(done.launch_s for done in times)
    cycles, lines = sum(done.cycles for done in times), np.array([done.dram.sum() for done in times], float)
    slots = np.sum([done.slots.sum(axis=0) for done in times], axis=0)
    moved = sum(done.dram_bytes for done in times)
    camping = [camping_factor(done) for done in times]
    return {
        "time_s": total_s,
        "launch_share": launch_s / total_s,
        "ipc": sum(done.instructions for done in times) / (cycles * machine.num_sms),
        # slot 0 is `issued`
        "issued": float(slots[0] / slots.sum()),
        "dram_bytes": moved,
        # launches move nothing: the rate is over what remains of the time
        "bandwidth_share": moved / ((total_s - launch_s) * machine.memory.gpu.dram.bytes_per_s),
        "l1_hit_rate": float(np.mean([done.l1_hit_rate for done in times])),
        # launches that move many lines count more; without DRAM traffic nothing camps
        "camping": float(np.average(camping, weights=lines)) if lines.sum() else 1.0,
        "phases": float(sum(len(phases_of(done)) for done in times)),
        "kernels": float(len(times)),
    }
