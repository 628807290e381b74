"""A client of Dask: of a scheduler that runs, or of a cluster that is started for the study."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors import ConfigError, Problem
from dse.evaluation.workers import SIGNALS_OF_A_TERMINAL, signals_for_this_process
from dse.plugins import SAFE_PATH, safe_imports
from dse_cluster.remote import leave
from dse_cluster.settings import ClusterExecutor, ClusterKind

if TYPE_CHECKING:
    from distributed import Client, Security

_ANSWER_S = 10.0
_LOOPBACK = "127.0.0.1"
_CLASSES: Mapping[ClusterKind, str] = {
    "local": "distributed.LocalCluster",
    "ssh": "distributed.SSHCluster",
    "slurm": "dask_jobqueue.SLURMCluster",
    "pbs": "dask_jobqueue.PBSCluster",
    "lsf": "dask_jobqueue.LSFCluster",
    "kubernetes": "dask_kubernetes.operator.KubeCluster",
}
_QUEUES: Collection[ClusterKind] = ("slurm", "pbs", "lsf")


class ClusterError(OSError):
    """The cluster cannot be used; what was recorded is kept. The text says what to do."""


@contextmanager
def connected(executor: ClusterExecutor) -> Iterator[Client]:
    """A client while it lasts, of a cluster that ends with it unless it ran before.

    Raises ConfigError for settings that cannot be used, and ClusterError where nothing answers.
    """
    _class("distributed.Client")
    from distributed import Client

    security = _security(executor)
    with ExitStack() as stack:
        target: Any = executor.address
        if target is None:
            stack.enter_context(_without_pages(executor))
            target = stack.enter_context(_start(executor, security))
        try:
            client = Client(target, security=security, timeout=_ANSWER_S, set_as_default=False, name="dse")
        except (OSError, TimeoutError) as error:
            way = "start one (dask scheduler), or let one be started: executor.cluster=local"
            raise ClusterError(f"no scheduler answers at {executor.address} ({error}): {way}") from None
        stack.enter_context(client)
        dashboard = f", dashboard {client.dashboard_link}" if _has_dashboard(executor) else ""
        print(f"Dask: {client.scheduler.address}{dashboard}", file=sys.stderr)
        yield client
        if executor.address is None:
            client.run(leave)


@contextmanager
def _start(executor: ClusterExecutor, security: Security | None) -> Iterator[Any]:
    """A cluster with workers of one thread each."""
    kind = executor.cluster
    settings: dict[str, Any] = dict(executor.settings)
    if security is not None:
        settings["security"] = security
    if kind == "local":
        settings = {**_of_this_machine(executor), **settings}
    elif kind in _QUEUES:  # whose jobs need not inherit the environment
        settings["job_script_prologue"] = [f"export {SAFE_PATH}=1", *settings.get("job_script_prologue", ())]
    make = _class(_CLASSES[kind])
    try:
        with signals_for_this_process(SIGNALS_OF_A_TERMINAL), safe_imports():
            cluster = make(**settings)
    except (TypeError, ValueError) as error:
        way = f"see {_CLASSES[kind]} in the documentation of Dask"
        raise ConfigError(
            [Problem("executor.settings", f"do not suit {kind}: {error}", dict(executor.settings), way)]
        ) from None
    except (OSError, RuntimeError) as error:
        raise ClusterError(f"the cluster ({kind}) was not started: {error}") from None
    with cluster:
        if executor.most_jobs is not None:
            least = min(executor.num_jobs, executor.most_jobs)
            cluster.adapt(minimum=least, maximum=executor.most_jobs, **_eagerness(executor))
        elif kind != "local":
            cluster.scale(executor.num_jobs)
        yield cluster


def _of_this_machine(executor: ClusterExecutor) -> dict[str, Any]:
    """Settings of a cluster on this machine, unless others are typed: it listens to itself, and has no dashboard."""
    return {
        "silence_logs": logging.CRITICAL,  # or Dask tells of every worker that ends before its scheduler
        "host": _LOOPBACK,
        "dashboard_address": f"{_LOOPBACK}:0",
        "threads_per_worker": 1,
        "n_workers": executor.num_jobs,
        "scheduler_kwargs": {"dashboard": _has_dashboard(executor)},
    }


@contextmanager
def _without_pages(executor: ClusterExecutor) -> Iterator[None]:
    """While a cluster lasts whose dashboard nobody asked for: its servers have no pages, as these have no password."""
    import dask

    if _has_dashboard(executor):
        yield
        return
    with dask.config.set({f"distributed.{part}.http.routes": [] for part in ("scheduler", "worker")}):
        yield


def _eagerness(executor: ClusterExecutor) -> Mapping[str, Any]:
    """How soon Dask asks for more workers: as long as those that are there have a second chunk waiting.

    It knows of the chunks that were sent alone. On Kubernetes its operator decides that.
    """
    return {} if executor.cluster == "kubernetes" else {"target_duration": f"{executor.chunk_s / 2} s"}


def _expiry(cert: Path) -> str:
    """The day on which a certificate ended, and the hour; "" for one that is valid, or that this cannot tell of."""
    try:
        from cryptography import x509

        ended = x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc
    except (ImportError, ValueError, OSError):
        return ""
    return f"{ended:%Y-%m-%d %H:%M} UTC" if ended < datetime.now(UTC) else ""


def _security(executor: ClusterExecutor) -> Security | None:
    """TLS between all of the cluster, where there are certificates. Raises ConfigError."""
    from distributed import Security

    files = executor.tls_files
    if files is None and executor.cluster == "local" and executor.address is None and not executor.plain:
        return _security_for_once()
    if files is None:
        return None
    if missing := [path for path in files if not path.is_file()]:
        way = "put ca.pem, cert.pem and key.pem of your cluster there"
        raise ConfigError([Problem("executor.tls", f"lacks {missing[0].name}", executor.tls, way)])
    if ended := _expiry(files[1]):
        rule = f"holds certificates that were valid until {ended}"
        way = "make new ones, and name their folder: executor.tls=<folder>"
        raise ConfigError([Problem("executor.tls", rule, executor.tls, way)])
    authority, cert, key = map(str, files)
    roles = {f"tls_{role}_{part}": path for role in ("client", "scheduler", "worker")
             for part, path in (("cert", cert), ("key", key))}  # fmt: skip
    return Security(tls_ca_file=authority, require_encryption=True, **roles)


def _security_for_once() -> Security:
    """TLS of a cluster on this machine, whose other users could send it work else; the key is in memory alone."""
    from distributed import Security

    try:
        security: Security = Security.temporary()
    except ImportError:
        rule = "needs cryptography, which is not installed, to keep other users of this machine out"
        raise ConfigError([Problem("executor", rule, None, "pip install cryptography")]) from None
    return security


def _has_dashboard(executor: ClusterExecutor) -> bool:
    """Tell whether somebody asked for the dashboard of a cluster on this machine; others have theirs as Dask says."""
    return executor.cluster != "local" or executor.address is not None or "dashboard_address" in executor.settings


def _class(path: str) -> Callable[..., Any]:
    """A class of a library that may not be installed. Raises ConfigError."""
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except ImportError:
        package = module.partition(".")[0].replace("_", "-")
        rule = f"needs {package}, which is not installed"
        way = package if package == "dask-kubernetes" else "'overlap-dse-cluster[dask]'"
        raise ConfigError([Problem("executor", rule, None, f"pip install {way}")]) from None
    return found
