"""Checks that a plug-in author runs in tests: a backend that passes them can be planned, stored, resumed and compared.

>>> from dse.backend import Backend, Batch, Metric, Result, Results
>>> from dse.values import Frozen
>>> class Wire(Frozen):
...     payload_bytes: float
>>> class Wires(Backend):
...     version, metrics = "1", {"time_s": Metric("s", "of one payload at 1 GB/s")}
...     def design(self, tree):
...         return Wire.model_validate(tree)
...     def evaluate(self, batches):
...         return [self._times(batch) for batch in batches]
...     def _times(self, batch):
...         rows = [Result("ok", {"time_s": wire.payload_bytes / 1e9}) for wire in batch.designs()]
...         return Results.of(rows)
>>> check_backend(Wires(), [Batch(Wire(payload_bytes=1e6))])
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from dse.backend import Backend, Batch, Lawful, Metric, Result, Results, Simulator, check_laws, check_results
from dse.values import content_key, content_keys, keys_to_hex, leaves


def check_backend(
    backend: Backend, batches: Sequence[Batch], *, tolerance: float = 0.0, timed: Collection[str] = ()
) -> None:
    """Check everything that orchestration relies on, on some batches of designs.

    tolerance: relative difference allowed between a grid and its designs evaluated one by one. timed: metrics that are
    times on a clock, which differ from run to run. Raises AssertionError, with what does not hold.
    """
    check_members(backend)
    for batch in batches:
        check_keys(batch)
        check_axes(backend, batch)
    check_screening(backend, batches)
    check_evaluation(backend, batches, tolerance=tolerance, timed=timed)


def check_members(backend: Backend) -> None:
    """Check the four members: a version, metrics with units and legal ranges, `design` and `evaluate`."""
    assert isinstance(backend, Simulator), f"{type(backend).__name__} lacks version, metrics, design or evaluate"
    assert backend.version and isinstance(backend.version, str), "version is a text that changes when results do"
    assert backend.metrics, "a backend measures something"
    for name, metric in backend.described.items():
        assert isinstance(metric, Metric), f"{name} is described by a Metric"
        assert name.isidentifier(), f"{name} is a column of the table"
        assert metric.low < metric.high, f"{name} has a legal range"
    assert len(backend.described) == len(backend.metrics) + len(backend.relations) + len(backend.bounds), (
        "no name twice"
    )
    assert backend.batch >= 1, "batch is the number of designs of a call"


def check_keys(batch: Batch) -> None:
    """Check that designs are frozen values, and that a grid gives its designs the keys that they have alone."""
    alone = [content_key(design) for design in batch.designs()]
    grid = [key.decode() for key in keys_to_hex(content_keys(batch.design, batch.axes))]
    assert grid == alone, "the keys of a grid are its designs' keys"
    assert len(set(alone)) == len(alone), "designs that differ have different keys"
    assert batch.design.model_config.get("frozen"), f"{type(batch.design).__name__} is a frozen model"


def check_axes(backend: Backend, batch: Batch) -> None:
    """Check that the axes of a batch are numbers that the backend takes as axes."""
    paths = {path for path, _, _ in leaves(batch.design)}
    for path, values in batch.axes.items():
        assert path in paths, f"{path} is a leaf of the design"
        assert backend.is_axis(path, batch.design), f"{path} is an axis"
        assert np.issubdtype(values.dtype, np.number), f"{path} is a number"


def check_screening(backend: Backend, batches: Sequence[Batch]) -> None:
    """Check that what is known before a run is what rules say of each design alone, and what evaluating it gives."""
    screened, evaluated = backend.screen(batches), backend.evaluate(batches)
    assert [results.size for results in screened] == [batch.size for batch in batches], "one result for each design"
    for batch, before, after in zip(batches, screened, evaluated, strict=True):
        assert not before.metrics, "screening simulates nothing"
        for place, design in enumerate(batch.designs()):
            reason = "; ".join(map(str, backend.problems(design)))
            assert before[place] == Result("infeasible" if reason else "ok", reason=reason)
            assert not reason or before[place] == after[place], f"evaluating finds another reason than: {reason}"
            assert after[place].status != "infeasible" or after[place].reason == reason, after[place].reason


def check_evaluation(
    backend: Backend, batches: Sequence[Batch], *, tolerance: float = 0.0, timed: Collection[str] = ()
) -> None:
    """Check results: legal, the same when asked again, and those of a grid equal to those of its designs alone."""
    laws = backend.laws if isinstance(backend, Lawful) else ()
    together = [check_laws(check_results(results, backend.metrics), laws) for results in backend.evaluate(batches)]
    assert [results.size for results in together] == [batch.size for batch in batches], "one result for each design"
    for batch, results in zip(batches, together, strict=True):
        statuses = {results[place].status for place in range(results.size)}
        assert statuses <= {"ok", "infeasible", "unsupported"}, _reasons(results)
        again = backend.evaluate([batch])[0]
        alone = Results.join([backend.evaluate([Batch(design)])[0] for design in batch.designs()])
        for place in range(results.size):
            _assert_equal(again[place], _without(results[place], timed), 0.0, "evaluated again")
            _assert_equal(alone[place], _without(results[place], timed), tolerance, "a design alone and in its grid")


def _without(result: Result, names: Collection[str]) -> Result:
    return replace(result, metrics={name: value for name, value in result.metrics.items() if name not in names})


def _assert_equal(first: Result, second: Result, tolerance: float, where: str) -> None:
    assert (first.status, first.reason) == (second.status, second.reason), f"{where}: {first} and {second}"
    for name, value in second.metrics.items():
        close = math.isclose(first.metrics[name], value, rel_tol=tolerance, abs_tol=0.0)
        assert close, f"{where}: {name} = {first.metrics[name]!r} and {value!r}"


def _reasons(results: Results) -> str:
    return "; ".join(filter(None, {results[place].reason for place in range(results.size)}))
