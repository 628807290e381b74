"""The `executor` group of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from dse.evaluation.workers import num_cpus
from dse.values import Frozen
from dse.values.units import Bytes, Fraction, Integer, Seconds


def _some(jobs: int) -> int:
    if jobs == 0:
        raise ValueError("must be at least 1, or -1 for one per core")
    return jobs


class ExecutorSettings(Frozen):
    """The `executor` group. evaluator: plug-in that evaluates, which may have keys of its own. jobs: worker processes,
    -1 for one per core.

    timeout_s: that evaluating one design may take; memory_bytes: address space of a worker; null for no limit.
    max_retries: how often a design is tried again whose worker was lost. broken_after: failures in a row, all alike,
    after which a study stops; 0 for never. max_failed_fraction: of the points, beyond which the exit code is 3.
    recheck: share of the points that are evaluated twice, the second time in a process of their own, and compared.
    """

    name: str
    description: str = ""
    evaluator: str = "local"
    jobs: Annotated[Integer, Field(ge=-1, le=1024), AfterValidator(_some)] = -1
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    memory_bytes: Annotated[Bytes, Field(ge=1e8)] | None = None  # an interpreter with its libraries takes that much
    max_retries: Annotated[Integer, Field(ge=0, le=100)] = 1
    broken_after: Annotated[Integer, Field(ge=0)] = 5
    max_failed_fraction: Fraction = 0.0
    recheck: Fraction = 0.0

    @property
    def num_jobs(self) -> int:
        """Worker processes."""
        return num_cpus() if self.jobs < 0 else self.jobs
