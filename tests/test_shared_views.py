"""Views that are saved in MLflow: what they hold, and what its page makes of them in a browser."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from dse.results.selection import SelectionRule
from dse.tracking.database import open_store
from dse.tracking.shared_views import BEST, FRONT, TAG, PointColumns, links, points_view, runs_view
from dse.tracking.study import StudyFolder
from dse.tracking.sync import sync
from tests.folders import finished, odd_table

CHROMIUM = shutil.which("chromium")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=3000,900"),
)


def test_points_are_ordered_best_first_with_objectives_and_knobs_as_columns() -> None:
    goals = {"makespan_s": "minimize", "comm_cu_s": "minimize"}
    view = points_view("run", PointColumns({"schedule.name": True, "a=b": False}, goals, ["speedup"]))
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`makespan_s`", True)
    assert view["selectedColumns"] == [
        *("metrics.`makespan_s`", "metrics.`comm_cu_s`", "metrics.`speedup`"),
        *("params.`schedule.name`", "params.`a_b`"),
    ]
    scatter, parallel = view["compareRunCharts"]
    assert (scatter["xaxis"]["key"], scatter["yaxis"]["key"]) == ("makespan_s", "comm_cu_s")
    assert (parallel["selectedParams"], parallel["selectedMetrics"]) == (["schedule.name"], list(goals))


def test_points_of_several_scenarios_are_ordered_by_what_compares_them() -> None:
    view = points_view("run", PointColumns({}, {"makespan_s": "minimize"}, order=("speedup", "maximize")), front=True)
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`speedup`", False)
    assert "tags.`dse.on_front` = 'true'" in view["searchFilter"]
    assert runs_view(["num_points"])["selectedColumns"][-1] == "metrics.`num_points`"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a store that shows a study."""
    folder = tmp_path_factory.mktemp("shown")
    uri = f"sqlite:///{folder}/mlflow.db"
    sync(finished(folder / "outputs", odd_table()), open_store(uri), SelectionRule("all"))
    return uri


@pytest.mark.slow
def test_every_study_has_views_of_its_best_points_and_of_its_front(shown: str) -> None:
    client = open_store(shown).client
    (best, page), (front, charts), (compared, pair) = links(client, "http://here")
    assert best.endswith("best points")
    assert front.endswith("front")
    assert compared.endswith("the two best compared")
    assert len(re.findall(r"[0-9a-f]{32}", pair)) == 2
    assert all("workflowType=machine_learning" in link for link in (page, charts, pair))
    assert [link.partition("ShareKey=")[2] for link in (page, charts)] == [BEST, f"{FRONT}&compareRunsMode=CHART"]
    experiment = client.get_experiment(re.findall(r"experiments/(\d+)/", page)[0])
    for key in (BEST, FRONT):
        assert json.loads(experiment.tags[f"{TAG}{key}"])["searchFilter"].startswith("tags.`mlflow.parentRunId` = ")


@pytest.fixture
def server(shown: str) -> Iterator[tuple[str, str]]:
    """Address of the served UI, and what the command printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "dse", "ui", f"uri={shown}", f"port={port}", "open=false"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if "compared: http" in line:
                    break
            yield f"http://127.0.0.1:{port}", "".join(lines)
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
@pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed: make extras")
def test_a_browser_shows_metrics_and_knobs_of_the_saved_view(server: tuple[str, str], tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    address, printed = server
    assert "ready after" in printed
    assert "Warning" not in printed
    page = re.findall(rf"best points: ({re.escape(address)}\S+)", printed)[0]
    assert {"makespan_s", "schedule.name", "mover", "chunks"} <= headers(page, tmp_path)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1600, "height": 900})
        tab.goto(re.findall(r"compared: (\S+)", printed)[0])
        tab.get_by_text("schedule.name").first.wait_for(timeout=60_000)
        texts = tab.inner_text("body")
        tab.screenshot(path=tmp_path / "compared.png")
        browser.close()
    assert "Comparing 2 Runs" in texts
    assert len(re.findall(r"^00000\d g", texts, re.MULTILINE)) >= 2


def test_knobs_that_never_vary_are_neither_columns_nor_in_names(tmp_path: Path) -> None:
    table = odd_table().assign(mover="cu")
    study = StudyFolder(finished(tmp_path, table))
    assert "mover" not in study.knobs
    assert "schedule.name" in study.knobs


def headers(page: str, profile: Path) -> set[str]:
    """Columns that can be sorted, as a browser shows them; asked again while the page still loads."""
    names: set[str] = set()
    for _ in range(3):
        command = [
            str(CHROMIUM),
            *QUIET,
            f"--user-data-dir={profile}",
            "--virtual-time-budget=30000",
            "--dump-dom",
            page,
        ]
        with suppress(subprocess.TimeoutExpired):
            text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
            names = set(re.findall(r'data-testid="sort-header-([^"]+)"', text))
        if names:
            return names
        time.sleep(1)
    return names
