"""The `executor` group of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import joblib
from pydantic import AfterValidator, Field, model_validator

from dse.units import Bytes, Fraction, Integer, Seconds, illegal
from dse.values import Frozen

_LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")

ClusterKind = Literal["local", "ssh", "slurm", "pbs", "lsf", "kubernetes"]


def _some(jobs: int) -> int:
    if jobs == 0:
        raise ValueError("must be at least 1, or -1 for one per core")
    return jobs


def _address(address: str) -> str:
    if not re.fullmatch(r"(tcp|tls)://[^/\s]+:\d+", address):
        raise illegal("must be that of a Dask scheduler, such as tls://<host>:8786", None)
    return address


class Executor(Frozen):
    """The `executor` group. jobs: worker processes, -1 for one per core.

    timeout_s: that evaluating one design may take; memory_bytes: address space of a worker; null for no limit.
    max_retries: how often a design is tried again whose worker was lost. broken_after: failures in a row, all alike,
    after which a study stops; 0 for never. max_failed_fraction: of the points, beyond which the exit code is 3.
    recheck: share of the points that are evaluated twice, the second time in a process of their own, and compared.

    address: of a Dask scheduler whose workers evaluate; or cluster: one that is started, with `settings` for Dask's
    class of it, and between `jobs` and most_jobs workers. tls: folder of certificates (`python -m dse certificates`).
    plain: whether to do without beyond this machine. chunk_s: work that a worker is given at a time.
    """

    name: str
    description: str = ""
    jobs: Annotated[Integer, Field(ge=-1, le=1024), AfterValidator(_some)] = -1
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    memory_bytes: Annotated[Bytes, Field(ge=1e8)] | None = None
    max_retries: Annotated[Integer, Field(ge=0, le=100)] = 1
    broken_after: Annotated[Integer, Field(ge=0)] = 5
    max_failed_fraction: Fraction = 0.0
    recheck: Fraction = 0.0
    address: Annotated[str, AfterValidator(_address)] | None = None
    cluster: ClusterKind | None = None
    settings: Mapping[str, Any] = Field(default_factory=dict)
    most_jobs: Annotated[Integer, Field(ge=1, le=100_000)] | None = None
    tls: str | None = None
    plain: bool = False
    chunk_s: Annotated[Seconds, Field(gt=0, le=60)] = 0.5

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.address is not None and self.tls is None and self.address.startswith("tls://"):
            raise ValueError("needs certificates for tls:// (executor.tls=<folder>; python -m dse certificates)")
        if self.address is not None and self.tls is not None and self.address.startswith("tcp://"):
            raise ValueError("has certificates, and tcp:// does without (write tls://<host>:<port>)")
        if self.leaves_machine and self.tls is None and not self.plain:
            text = "would send work to other machines in the clear, where anybody could send some, too"
            raise ValueError(f"{text} (executor.tls=<folder> of `python -m dse certificates`, or executor.plain=true)")
        return self

    @property
    def num_jobs(self) -> int:
        """Worker processes."""
        return joblib.cpu_count() if self.jobs < 0 else self.jobs

    @property
    def is_cluster(self) -> bool:
        """Flag: workers of Dask evaluate."""
        return self.address is not None or self.cluster is not None

    @property
    def leaves_machine(self) -> bool:
        """Flag: workers may be on other machines."""
        if self.address is not None:
            return not _LOOPBACK.fullmatch(self.address.partition("://")[2])
        return self.cluster not in (None, "local")

    @property
    def tls_files(self) -> tuple[Path, Path, Path] | None:
        """Certificate of the authority, own certificate, own key; None without TLS."""
        if self.tls is None:
            return None
        folder = Path(self.tls).expanduser()
        return folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
