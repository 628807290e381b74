"""The `executor` group of a study whose points workers of Dask evaluate, and what a file may give of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dse.errors import Problem, assignment, known_here
from dse.errors.parsing import whole_number
from dse.evaluation.evaluators import ExecutorSettings
from dse.values.units import Integer, Seconds, illegal

_LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")

ClusterKind = Literal["local", "ssh", "slurm", "pbs", "lsf", "kubernetes"]


_NAME = re.compile(r"[A-Za-z0-9][\w.,:@+-]{0,99}")
_SIZE = re.compile(r"\d[\w.]{0,20} ?[A-Za-z]{0,8}")
_RESOURCES = re.compile(r"[A-Za-z0-9][\w.,:=+]{0,99}")
_Kind = type[bool] | type[int] | re.Pattern[str]
_JOBS: Mapping[str, _Kind] = {
    **dict.fromkeys(("cores", "processes", "death_timeout", "n_workers"), int),
    **dict.fromkeys(("queue", "account", "project", "job_name", "interface", "walltime"), _NAME),
    "memory": _SIZE,
}
SETTINGS_OF_FILES: Mapping[ClusterKind, Mapping[str, _Kind]] = {
    "local": {"n_workers": int, "processes": bool, "memory_limit": _SIZE, "death_timeout": int},
    "ssh": {},
    "slurm": {**_JOBS, "job_cpu": int, "job_mem": _SIZE},
    "pbs": {**_JOBS, "resource_spec": _RESOURCES},
    "lsf": {**_JOBS, "ncpus": int, "mem": int, "lsf_units": _NAME, "use_stdin": bool},
    "kubernetes": {"name": _NAME, "namespace": _NAME, "n_workers": int},
}
"""Keys of `executor.settings` that a file may give for a kind of cluster, and their values: data, whatever they are.

All others go to the libraries of Dask unread. Some are code there (`preload`, `python`, `job_script_prologue`), open a
port (`host`, `dashboard_address`) or start what somebody else made (`image`, `hosts`), so a person types them.
"""
_TRUST = {
    "address": "names a scheduler, and what a scheduler sends is run",
    "tls": "names certificates, and who has them may send work to be run",
    "plain": "lets work cross a network in the clear, where anybody could send some, too",
}


_PLAIN_VALUE = "take it out of the file, or write one word or number there"


def problems_of_files(section: Mapping[str, Any]) -> list[Problem]:
    """Values of the section `executor` that no file may give, nor a recorded command: they could run code."""
    problems = list[Problem]()
    for name, rule in _TRUST.items():
        if value := section.get(name):
            problems.append(Problem(f"executor.{name}", rule, value, _typed(f"executor.{name}", value)))
    kind, settings = section.get("cluster"), section.get("settings")
    legal = SETTINGS_OF_FILES.get(kind, {}) if isinstance(kind, str) else {}  # type: ignore[call-overload]
    for name, value in settings.items() if isinstance(settings, Mapping) else ():
        path = f"executor.settings.{name}"
        if name not in legal:
            rule = f"goes to Dask unread, and a file may not give it ({known_here(sorted(legal))})"
            problems.append(Problem(path, rule, value, _typed(path, value)))
        elif not _suits(legal[name], value):
            problems.append(Problem(path, "is no plain value, and goes to Dask unread", value, _PLAIN_VALUE))
    return problems


def _typed(path: str, value: object) -> str:
    return f"look at it, and if it is yours take it out of the file and type `{assignment(path, value)}`"


def _suits(kind: _Kind, value: object) -> bool:
    """Tell whether a value is of a kind; a number is a text that needs no quotes."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, (int, float))
    assert isinstance(kind, re.Pattern)
    return isinstance(value, (str, int, float)) and kind.fullmatch(str(value)) is not None


def _address(address: str) -> str:
    match = re.fullmatch(r"(?:tcp|tls)://[^/\s]+:([^/:\s]+)", address)
    if match is None:
        raise illegal("must be that of a Dask scheduler, such as tls://<host>:8786", None)
    port = whole_number(match[1])
    if port is None or not 0 < port < 1 << 16:
        raise illegal("has a port that is no number from 1 to 65535", "a scheduler of Dask listens at 8786 by default")
    return address


class ClusterExecutor(ExecutorSettings):
    """The `executor` group of `evaluator: dask`. Raises for a cluster that is neither named nor started.

    address: of a Dask scheduler whose workers evaluate; or cluster: one that is started, with `settings` for Dask's
    class of it, and between `jobs` and most_jobs workers. tls: folder of ca.pem, cert.pem and key.pem.
    plain: whether to do without beyond this machine. chunk_s: work that a worker is given at a time.
    """

    address: Annotated[str, AfterValidator(_address)] | None = None
    cluster: ClusterKind = "local"
    settings: Mapping[str, Any] = Field(default_factory=dict)
    most_jobs: Annotated[Integer, Field(ge=1, le=100_000)] | None = None
    tls: str | None = None
    plain: bool = False
    chunk_s: Annotated[Seconds, Field(gt=0, le=60)] = 0.5

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.address is not None and self.tls is None and self.address.startswith("tls://"):
            raise ValueError("needs certificates for tls:// (executor.tls=<folder of ca.pem, cert.pem and key.pem>)")
        if self.address is not None and self.tls is not None and self.address.startswith("tcp://"):
            raise ValueError("has certificates, and tcp:// does without (write tls://<host>:<port>)")
        if self.leaves_machine and self.tls is None and not self.plain:
            text = "would send work to other machines in the clear, where anybody could send some, too"
            raise ValueError(f"{text} (executor.tls=<folder of your certificates>, or executor.plain=true)")
        return self

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
