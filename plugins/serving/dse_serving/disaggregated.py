"""Engines of disaggregated measured rows, by the published lists of the benchmark that ran them.

Rows name their software, model, lengths and requests, but not how many engines there were of each kind, nor how many
tokens they drafted. `conf/data/disaggregated_runs.csv` has what the benchmark's lists tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from dse.files import read_csv
from dse_serving.design import DATA

_WHAT = ("model_path", "system", "backend", "precision", "isl", "osl")
_ROLES = ("prefill", "decode")
_SIZES = ("workers", "gpus", "experts", "shared")
_COLUMNS = (*_WHAT, "requests", "drafts", "sequences", *(f"{role}_{size}" for role in _ROLES for size in _SIZES))


@dataclass(frozen=True)
class EnginesOfRole:
    """Equal engines: how many, GPUs of each, GPUs that share its experts, and whether attention is data-parallel."""

    workers: int
    gpus: int
    experts: int
    shared: bool

    @property
    def ranks(self) -> int:
        """Ranks that share its sequences."""
        return self.gpus if self.shared else 1


@dataclass(frozen=True)
class EngineRun:
    """Engines of prompts and those that generate, tokens drafted for each one, and most sequences of a rank; 0 where
    the lists do not have that number.
    """

    prompts: EnginesOfRole
    generating: EnginesOfRole
    drafts: int = 0
    sequences: int = 0


def runs_of(cells: Mapping[str, str], requests: int) -> tuple[EngineRun, ...]:
    """The runs that a row with these cells and so many requests under way may be of, each once.

    Rows of some exports have one degree of expert parallelism in both columns, so runs that have more of the row's
    degrees exclude those with fewer. Numbers of engines of the row count where it has them.
    """
    # the lists name a GPU without its form
    plain = {**cells, "system": cells["system"].removesuffix("_sxm")}
    key: tuple[str | int, ...] = (*(plain[name] for name in _WHAT), requests)
    found = _runs().get(key, ())
    fitting = [run for run in found if all(_agree(cells, run))]
    # 0 to 2: of both roles
    alike = [sum(_same_experts(cells, run)) for run in fitting]
    return tuple(dict.fromkeys(run for run, same in zip(fitting, alike, strict=True) if same == max(alike)))


def _agree(cells: Mapping[str, str], run: EngineRun) -> Iterator[bool]:
    """Yield for each role if the row has as many engines as a run, or no such number."""
    for role, engines in zip(_ROLES, (run.prompts, run.generating), strict=True):
        number = cells.get(f"{role}_num_workers")
        yield not number or round(float(number)) == engines.workers


def _same_experts(cells: Mapping[str, str], run: EngineRun) -> Iterator[bool]:
    for role, engines in zip(_ROLES, (run.prompts, run.generating), strict=True):
        yield round(float(cells.get(f"{role}_moe_ep_size") or 1)) == engines.experts


@cache
def _runs() -> Mapping[tuple[str | int, ...], tuple[EngineRun, ...]]:
    """Runs of the table by what ran and how many requests were under way."""
    runs: dict[tuple[str | int, ...], tuple[EngineRun, ...]] = {}
    for _, line in read_csv(DATA / "disaggregated_runs.csv", needed=_COLUMNS).rows:
        prompts, generating = (_engines(line, role) for role in _ROLES)
        run = EngineRun(prompts, generating, int(line["drafts"]), int(line["sequences"] or 0))
        for requests in line["requests"].split():
            key: tuple[str | int, ...] = (*(line[name] for name in _WHAT), int(requests))
            runs[key] = (*runs.get(key, ()), run)
    return runs


def _engines(line: Mapping[str, str], role: str) -> EnginesOfRole:
    workers, gpus, experts, shared = (int(line[f"{role}_{size}"]) for size in _SIZES)
    return EnginesOfRole(workers, gpus, experts, bool(shared))
