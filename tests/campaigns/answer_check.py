"""First table of every study, read for the quantity of its question; bounds and baselines among what wins.

`python -m tests.campaigns.answer_check [<study> ...]` runs every shipped study with few points and prints what is
missing: nothing, if each study answers. `QUANTITIES` says in words, apart from what the studies declare, what a person
who asked looks for in the head of the first table.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.recorded import ROOT
from dse.cli import main as dse
from dse.results.answer import answer_tables
from dse.results.pareto import Contest
from dse.results.run_folder import Outputs

QUIET = ("tracking=none", "store=none", "timeline=false", "figures=none", "fidelity=none")
_RANDOM = ("search=random",)
_CPU = ("kernels.precisions=[fp32]", "kernels.gemms=[[64,64,64]]", "kernels.copies=[]", "kernels.overlaps=[]")
_KERNELS = (*_CPU, "kernels.beside=[]", "kernels.gpus=[]", "kernels.sizes=[]", "space.kernel.free_sms=choice(0)")
_ONE = "workload.only=[{}]".format
_SITES = ("models=[llama3_8b]", "systems=[h100_8]", "modes=[prefill]", "budget.trials=4")
_COMMAND = "['study=ficco_sweep', 'workload.only=[g4]', 'study.objectives=[makespan_s,comm_cu_s]']"
_TWO_METHODS = ("space.run.method=choice(tpe,random)", "space.run.seed=range(0,2)")
_TIMER = ("simulator.device=cpu", "simulator.samples=6", "simulator.most_scatter=1e6", "simulator.most_drift=1e6")
SMALL: Mapping[str, tuple[str, ...]] = {
    "bert": (),
    "cache_policies": ("applications=[fw_soft,bw_pool]", "run.requests=20000", "run.repeats=1"),
    "cache_policies_ptx": ("applications=[fw_soft,bw_soft]",),
    "cache_sizes": ("applications=[fw_soft]", "run.requests=10000", "run.repeats=1"),
    "codesign": ("budget.trials=12", "~workloads.training", "~workloads.prefill", *_RANDOM),
    "comp_vs_comm": ("space.run.sequence_length=choice(2048)", "space.run.batch=choice(1)"),
    "conccl": (_ONE("70b_out-equal-ag,70b_out-clong-ag"),),
    "power": (_ONE("70b_qkv-equal-ag"),),
    "dlrm_scaleout": (_ONE("dlrm-t100"), "space.system.fabric.num_nodes=choice(1,4,16)"),
    "ficco": (_ONE("g4"), "budget.trials=24", *_RANDOM),
    "ficco_rules": (_ONE("g1"), "budget.trials=12", *_RANDOM),
    "ficco_sweep": (_ONE("g1,g4"), "space.schedule.num_chunks=choice(2,8)", "space.schedule.comm_cus=choice(56)"),
    "ficco_unseen": (_ONE("llama3.1_405b-qkv-4k"), "budget.trials=12", *_RANDOM),
    "fused_ops": (_ONE("emb-p10-b512,gemv-70b_out"), "~study.probes", "budget.trials=24", *_RANDOM),
    "fused_workgroups": (_ONE("emb-p10-b512"), "space.system.name=choice(mi210_4,mi210_2x1)"),
    "gpgpusim": ("works=[conv1]",),
    "goldyloc": (_ONE("lstm-h512-b32"), "space.schedule.num_streams=choice(1,4,16)"),
    "goldyloc_arrivals": ("arrivals.only=[lstm-h512-4x8]", "space.logic.policy=choice(sequential,default,static)"),
    "convolution_patterns": ("applications=[lenet]", "measured=[]", "run.requests=20000", "run.most=100000"),
    "jitq": ("models=[llama2_7b]", "budget.trials=48", *_RANDOM),
    "measure_my_gpu": (*_KERNELS, *_TIMER),
    "nic_placement": (_ONE("dlrm-t100"), "budget.trials=24", *_RANDOM),
    "operators": ("devices=[p100]",),
    "overlap_measured": (_ONE("8192-all_reduce-512M"),),
    "peers": (),
    "plan": ("budget.trials=8",),
    "prefill_decode": ("budget.trials=12", "traffic.requests=60", *_RANDOM),
    "search_benchmark": (
        "~landscapes",
        f"+landscapes={{small: {{command: {_COMMAND}}}}}",
        "budget.trials=16",
        *_TWO_METHODS,
    ),
    "serving": ("budget.trials=12", "traffic.requests=60", *_RANDOM),
    "seqpoint": ("models=[{model: gnmt, lengths: iwslt15}]",),
    "synthesis": (_ONE("g1"), "space.system.node.topology=choice(mesh)"),
    "t3": (_ONE("tnlg-tp8-op,megagpt2-tp8-op"),),
    "t3_hardware": (_ONE("tnlg-tp16-ip"), "budget.trials=24", *_RANDOM),
    "t3_mi300x": (_ONE("tnlg-tp8-op"),),
    "t3_requests": (_ONE("tnlg-tp8-op"),),
    "trace": ("budget.trials=2", *_RANDOM),
    "whole_models": _SITES,
}
"""Study -> overrides with which it has few points, and still all that its question is about."""
QUANTITIES: Mapping[str, tuple[str, ...]] = {
    "bert": ("precision", "share FC", "share optimizer"),
    "cache_policies": ("speed-up", "traffic", "with"),
    "cache_policies_ptx": ("speed-up", "traffic", "with"),
    "cache_sizes": ("speed-up", "with"),
    "codesign": ("decode", "power", "cost"),
    "comp_vs_comm": ("hidden size", "communication's share at 1x", "communication's share at 4x"),
    "conccl": ("fraction of ideal",),
    "power": ("energy", "mean power"),
    "dlrm_scaleout": ("nodes", "makespan, GPU", "makespan, CPU"),
    "ficco": ("speed-up", "with"),
    "ficco_rules": ("rate of a link", "CUs", "with"),
    "ficco_sweep": ("speed-up", "with"),
    "ficco_unseen": ("rate of a link", "CUs", "with"),
    "fused_ops": ("speed-up, mi210 4", "speed-up, mi210 2x1"),
    "fused_workgroups": ("speed-up, mi210 4", "speed-up, mi210 2x1"),
    "gpgpusim": ("algorithm", "launch share", "camping"),
    "goldyloc": ("speed-up", "with"),
    "goldyloc_arrivals": ("speed-up", "with"),
    "convolution_patterns": ("algorithm", "launch share", "camping"),
    "jitq": ("throughput lost", "capacity saved"),
    "measure_my_gpu": ("seconds",),
    "nic_placement": ("makespan", "with"),
    "operators": ("median error", "p90 error"),
    "overlap_measured": ("contention inefficiency", "contention inefficiency of the collective"),
    "peers": ("model", "median error"),
    "plan": (),
    "prefill_decode": ("split", "tokens/s a GPU"),
    "search_benchmark": ("method", "points to 95"),
    "serving": ("split", "tokens/s a GPU"),
    "seqpoint": ("projection error", "profiled"),
    "synthesis": ("best preset", "synthesised", "proven"),
    "t3": ("speed-up", "with"),
    "t3_hardware": ("speed-up", "DRAM traffic", "hardware cost"),
    "t3_mi300x": ("speed-up", "with"),
    "t3_requests": ("speed-up", "with"),
    "trace": ("gain", "gain, at least", "gain, at most"),
    "whole_models": ("speed-up", "with"),
}
"""Study -> what a person who asked looks for in the head of the first table, in words."""


@dataclass(frozen=True)
class Read:
    """An answer as it was printed. head: columns of the first table. rows: texts of cells. sentences: beside tables."""

    study: str
    question: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...]
    in_short: str


def small_run(study: str, folder: Path) -> Outputs:
    """Run a study with few points below a folder. Raises RuntimeError where it does not end well."""
    if code := dse([f"study={study}", f"output_dir={folder}", *QUIET, *SMALL[study]]):
        raise RuntimeError(f"study={study} ended with exit code {code}")
    return Outputs.latest(folder, study)


def read(outputs: Outputs) -> Read:
    """Read what a finished run printed first."""
    record, printed = outputs.read_json("summary"), list(answer_tables(outputs, outputs.read_table("results")))
    tables = [part for part in printed if not isinstance(part, str)]
    sentences = tuple(part for part in printed if isinstance(part, str))
    columns = tables[0].columns if tables else []
    head = tuple(str(column.header) for column in columns)
    rows = tuple(zip(*([str(cell) for cell in column.cells] for column in columns), strict=True))
    return Read(record["study"], record["question"], head, rows, sentences, record["answer"])


def faults(outputs: Outputs) -> Iterator[str]:
    """Yield what is wrong with the answer of a finished run."""
    answered = read(outputs)
    yield from (f"no {word}" for word in QUANTITIES[answered.study] if not any(word in name for name in answered.head))
    if not answered.rows and not answered.sentences:
        yield "nothing is printed"
    for place, name in enumerate(answered.head):
        is_quantity = any(word in name for word in QUANTITIES[answered.study])
        if is_quantity and name != "with" and all(row[place] in {"–", ""} for row in answered.rows):
            yield f"{name} is empty"
    for text in (*(text for row in answered.rows for text in row), *answered.sentences, answered.in_short):
        if re.search(r"\de[+-]?\d", text):
            yield f"a number with an exponent: {text}"
    if answered.in_short.rstrip().endswith((" to", ",", " by", " of", "and")):
        yield f"in short ends in mid-sentence: {answered.in_short}"
    yield from _wrong_winners(outputs)
    yield from (f"the heading does not name {name}" for name in _names(outputs) if name not in answered.question)


def _names(outputs: Outputs) -> Sequence[str]:
    """Names of the scenarios of a run with few of them."""
    names = list(dict.fromkeys(outputs.read_table("results")["scenario"]))
    return [name for name in names if name] if len(names) <= 2 else []


def _wrong_winners(outputs: Outputs) -> Iterator[str]:
    """Yield which winners are bounds, or baselines that others are compared with."""
    record, table = outputs.read_json("summary"), outputs.read_table("results")
    contest = Contest.of(record)
    for _, row in contest.winners(table, record["goals"], apart=True).iterrows():
        for path, values in {**contest.answer.bounds, **contest.answer.baselines}.items():
            if path in row and str(row[path]) in map(str, values):
                yield f"{row[path]} wins {row['scenario']}"


def studies() -> list[str]:
    """Shipped studies that this machine can run."""
    names = sorted(path.stem for path in (ROOT / "conf" / "study").glob("*.yaml"))
    return [name for name in names if name != "measure_my_gpu" or find_spec("torch")]


def answers_missing(names: Sequence[str] | None = None) -> list[str]:
    """Names of studies whose first table lacks the quantity of its question, each with what is wrong."""
    missing = []
    for study in names or studies():
        with tempfile.TemporaryDirectory() as folder:
            wrong: list[Any] = list(faults(small_run(study, Path(folder))))
        missing += [f"{study}: {'; '.join(wrong)}"] if wrong else []
    return missing


def main() -> int:
    """Print what is missing; 1 where something is."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.answer_check", description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*")
    missing = answers_missing(parser.parse_args().studies or None)
    print("\n".join(missing) or "every study answers")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
