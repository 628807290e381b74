"""Saved views of MLflow's runs page: knobs and objectives as columns, best first, and charts of the front.

MLflow keeps the state of a shared view in a tag of its experiment, `mlflow.sharedViewState.<key>`, and shows it at
`#/experiments/<id>/runs?viewStateShareKey=<key>`. The state is what its own page writes there: facets of the search,
and the columns and charts of the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from dse.errors.parsing import parse_json
from dse.tracking.points import MAY_WIN, mlflow_name

TAG: Final = "mlflow.sharedViewState."
BEST: Final = "best"  # key of the view of a study's points
FRONT: Final = "front"  # key of the view of those on the Pareto front, with charts
RUNS: Final = "runs"  # key of the view of its study runs
_TRAINING: Final = "workflowType=machine_learning"  # the page of runs; MLflow opens that of language models otherwise
_ON_FRONT: Final = "tags.`dse.on_front` = 'true'"
_MAY_WIN: Final = f"tags.`dse.status` = 'ok' and tags.`{MAY_WIN}` = 'true'"
CHARTS: Final = "compareRunsMode=CHART"
_MOST_COLUMNS: Final = 16  # more do not fit a screen
_MOST_AXES: Final = 8  # of parallel coordinates
_SECTION: Final = "dse"
_WIDE: Final = {"columns": 1, "cardHeight": 420}  # one chart in a row, in pixels
_FACETS: Final[Mapping[str, Any]] = {
    **{"runsPinned": [], "runsHidden": [], "runsExpanded": {}, "runsVisibilityMap": {}},  # MLflow 3.10 has no defaults
    **{"groupBy": None, "groupsExpanded": {}, "useGroupedValuesInCharts": True, "hideEmptyCharts": True},
    "runsHiddenMode": "SHOW_ALL",
    "startTime": "ALL",
    "lifecycleFilter": "Active",
    "datasetsFilter": [],
    "modelVersionFilter": "All Runs",
}


@dataclass(frozen=True)
class PointColumns:
    """Columns of a study's points.

    knobs: searched dotted path -> whether every point has it; others are no axes, as a chart with a param that no
    loaded run has is not drawn. goals: objective -> minimize or maximize. metrics: others that the study shows. order:
    metric by which points are ordered, and its goal; the first objective by default.
    """

    knobs: Mapping[str, bool]
    goals: Mapping[str, str]
    metrics: Sequence[str] = ()
    order: tuple[str, str] | None = None


def points_view(run_id: str, columns: PointColumns, *, front: bool = False) -> dict[str, Any]:
    """State of the view of a study run's points, best first: those that may win. front: those on the Pareto front."""
    knobs, goals = columns.knobs, columns.goals
    first, kind = columns.order or next(iter(goals.items()))
    names = [mlflow_name(name) for name in dict.fromkeys([*goals, *columns.metrics])]
    params = [mlflow_name(path) for path in knobs]
    selected = [*map(_metric, names), *map(_param, params)]
    return {
        **_FACETS,
        "searchFilter": f"tags.`mlflow.parentRunId` = '{run_id}' and {_ON_FRONT if front else _MAY_WIN}",
        "orderByKey": _metric(mlflow_name(first)),
        "orderByAsc": kind == "minimize",
        "selectedColumns": selected[:_MOST_COLUMNS],
        "compareRunSections": [
            {**_WIDE, "uuid": _SECTION, "name": "Objectives and knobs", "display": True, "isReordered": False}
        ],
        "compareRunCharts": list(
            _charts(
                [mlflow_name(path) for path, everywhere in knobs.items() if everywhere],
                # the metric by which points are ordered comes first, once
                [mlflow_name(name) for name in dict.fromkeys([first, *list(goals)[first not in goals :]])],
            )
        ),
    }


def runs_view(curves: Sequence[str]) -> dict[str, Any]:
    """State of the view of an experiment's study runs: newest first, what was searched, and counts. curves: metrics."""
    columns = [*map(_param, ("search", "simulator", "budget.trials")), *map(_metric, curves)]
    return {
        **_FACETS,
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": columns[:_MOST_COLUMNS],
    }


def _charts(params: Sequence[str], goals: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the scatter of the first two goals, and parallel coordinates of knobs and goals."""
    common = {"metricSectionId": _SECTION, "deleted": False, "isGenerated": False}
    if len(goals) > 1:
        x, y = ({"key": name, "type": "METRIC"} for name in goals[:2])
        # as many as MLflow's page loads at a time
        yield {**common, "uuid": "front", "type": "SCATTER", "xaxis": x, "yaxis": y, "runsCountToCompare": 100}
    axes = {"selectedParams": list(params[:_MOST_AXES]), "selectedMetrics": list(goals[:_MOST_AXES])}
    if params:
        yield {**common, **axes, "uuid": "parallel", "type": "PARALLEL", "runsCountToCompare": 100, "showAllRuns": True}


def set_view(client: Any, experiment_id: str, key: str, state: Mapping[str, Any]) -> None:
    """Write the state of a view into its experiment."""
    # a tag has 8000 characters
    client.set_experiment_tag(experiment_id, f"{TAG}{key}", json.dumps(state, separators=(",", ":")))


def links(client: Any, address: str) -> Iterator[tuple[str, str]]:
    """Yield (what, address) of each study that has views, the newest first: its best points, its front, and its two
    best points compared.
    """
    names = "name LIKE 'dse/%/points'"
    experiments = client.search_experiments(filter_string=names, order_by=["last_update_time DESC"])
    for experiment in experiments:
        if f"{TAG}{BEST}" in experiment.tags:
            study, number = experiment.name.removeprefix("dse/").removesuffix("/points"), experiment.experiment_id
            page = f"{address}/#/experiments/{number}/runs?{_TRAINING}&viewStateShareKey="
            yield f"{study}, best points", f"{page}{BEST}"
            yield f"{study}, front", f"{page}{FRONT}&{CHARTS}"
            best = _best_runs(client, number, parse_json(experiment.tags[f"{TAG}{BEST}"], TAG))
            if len(best) > 1:
                runs = json.dumps(best, separators=(",", ":"))
                shown = f'compare-runs?runs={runs}&experiments=["{number}"]&{_TRAINING}'
                yield f"{study}, the two best compared", f"{address}/#/{quote(shown, safe='/?=&,')}"


def _best_runs(client: Any, experiment_id: str, state: Mapping[str, Any]) -> list[str]:
    """Ids of the two first runs of a view."""
    order = f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"
    runs = client.search_runs([experiment_id], state["searchFilter"], max_results=2, order_by=[order])
    return [str(run.info.run_id) for run in runs]


def _metric(name: str) -> str:
    return f"metrics.`{name}`"


def _param(name: str) -> str:
    return f"params.`{name}`"
