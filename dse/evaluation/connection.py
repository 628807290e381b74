"""A client of Dask: of a scheduler that runs, or of a cluster that is started for the study."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dse.errors import ConfigError, Problem
from dse.evaluation.remote import leave
from dse.evaluation.settings import ClusterKind, Executor

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


class ClusterError(OSError):
    """The cluster cannot be used; what was recorded is kept. The text says what to do."""


_KEPT: ContextVar[tuple[ExitStack, dict[str, Any]] | None] = ContextVar("kept", default=None)


@contextmanager
def kept() -> Iterator[None]:
    """Clusters that are connected to meanwhile stay until its end: parts of a study share one."""
    with ExitStack() as stack:
        token = _KEPT.set((stack, {}))
        try:
            yield
        finally:
            _KEPT.reset(token)


@contextmanager
def connected(executor: Executor) -> Iterator[Client]:
    """A client while it lasts, of a cluster that ends with it unless it ran before or is `kept`.

    Raises ConfigError for settings that cannot be used, and ClusterError where nothing answers.
    """
    shared = _KEPT.get()
    if shared is None:
        with _connected(executor) as client:
            yield client
        return
    stack, clients = shared
    if repr(executor) not in clients:
        clients[repr(executor)] = stack.enter_context(_connected(executor))
    yield clients[repr(executor)]


@contextmanager
def _connected(executor: Executor) -> Iterator[Client]:
    _class("distributed.Client")
    from distributed import Client

    security = _security(executor)
    with ExitStack() as stack:
        target: Any = executor.address
        if target is None:
            assert executor.cluster is not None
            target = stack.enter_context(_started(executor, security))
        try:
            client = Client(target, security=security, timeout=_ANSWER_S, set_as_default=False, name="dse")
        except (OSError, TimeoutError) as error:
            way = "start one (dask scheduler), or let one be started: executor.cluster=local"
            raise ClusterError(f"no scheduler answers at {executor.address} ({error}): {way}") from None
        stack.enter_context(client)
        print(f"Dask: {client.scheduler.address}, dashboard {client.dashboard_link}", file=sys.stderr)
        yield client
        if executor.address is None:
            client.run(leave)


@contextmanager
def _started(executor: Executor, security: Security | None) -> Iterator[Any]:
    """A cluster with workers of one thread each."""
    kind = executor.cluster
    assert kind is not None
    settings: dict[str, Any] = dict(executor.settings)
    if security is not None:
        settings["security"] = security
    if kind == "local":
        fixed = {
            "silence_logs": logging.ERROR,
            "host": _LOOPBACK,
            "dashboard_address": f"{_LOOPBACK}:0",
            "threads_per_worker": 1,
        }
        settings = {**fixed, "n_workers": executor.num_jobs, **settings}
    make = _class(_CLASSES[kind])
    try:
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


def _eagerness(executor: Executor) -> Mapping[str, Any]:
    """How soon Dask asks for more workers: as long as those that are there have a second chunk waiting.

    It knows of the chunks that were sent alone. On Kubernetes its operator decides that.
    """
    return {} if executor.cluster == "kubernetes" else {"target_duration": f"{executor.chunk_s / 2} s"}


def _security(executor: Executor) -> Security | None:
    """TLS between all of the cluster, where there are certificates. Raises ConfigError."""
    from distributed import Security

    files = executor.tls_files
    if files is None:
        return None
    if missing := [path for path in files if not path.is_file()]:
        way = "make them: python -m dse certificates out=<folder>"
        raise ConfigError([Problem("executor.tls", f"lacks {missing[0].name}", executor.tls, way)])
    authority, cert, key = map(str, files)
    roles = {f"tls_{role}_{part}": path for role in ("client", "scheduler", "worker")
             for part, path in (("cert", cert), ("key", key))}  # fmt: skip
    return Security(tls_ca_file=authority, require_encryption=True, **roles)


def _class(path: str) -> Callable[..., Any]:
    """A class of a library that may not be installed. Raises ConfigError."""
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except ImportError:
        package = module.partition(".")[0].replace("_", "-")
        rule = f"needs {package}, which is not installed"
        raise ConfigError([Problem("executor", rule, None, f"pip install {package}")]) from None
    return found
