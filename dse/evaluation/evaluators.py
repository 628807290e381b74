"""Evaluators of points by name (`executor.evaluator`): this machine, and what other distributions offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from dse import plugins
from dse.backend import Results
from dse.evaluation.calls import BackendSpec
from dse.evaluation.local import Evaluator
from dse.evaluation.settings import ExecutorSettings
from dse.space import KeyedBlock
from dse.store.contract import Session


@dataclass(frozen=True)
class Services:
    """Services of a study to its evaluation; see `Evaluator`."""

    session: Session
    advance: Callable[[int], None] = lambda count: None
    stopping: Callable[[], bool] = lambda: False


class AnyEvaluator(Protocol):
    """Evaluator of points, here or elsewhere. advance(n) is told of progress."""

    @property
    def advance(self) -> Callable[[int], None]:
        """As in `Evaluator`."""

    def results(self, points: Iterable[KeyedBlock]) -> Iterator[Results]:
        """As `Evaluator.results`."""


MakeEvaluator = Callable[[BackendSpec, ExecutorSettings, Services], AnyEvaluator]


@dataclass(frozen=True)
class EvaluatorKind:
    """A kind of evaluator, as a plug-in offers it.

    settings: model of its `executor` group. opened: context in which evaluators can be made; the parts of a study share
    what it opens, such as a connection. Making one raises ConfigError where settings and services do not suit.
    store_for: why it needs a store; "" where it needs none.
    """

    settings: type[ExecutorSettings]
    opened: Callable[[], AbstractContextManager[MakeEvaluator]]
    store_for: str = ""


def evaluate_here(spec: BackendSpec, executor: ExecutorSettings, services: Services) -> Evaluator:
    """Evaluator in this process and in worker processes of this machine."""
    return Evaluator(spec, executor, services.session, services.advance, services.stopping)


LOCAL = EvaluatorKind(ExecutorSettings, lambda: nullcontext(evaluate_here))


def evaluator_kind(name: str) -> EvaluatorKind:
    """The kind of evaluator of a name. Raises ConfigError where there is none."""
    kind: EvaluatorKind = plugins.load("evaluator", name)
    return kind
