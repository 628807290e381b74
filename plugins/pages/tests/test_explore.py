"""Every point of a table in a browser: answers are bounded and right, and only the printed address is served."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.errors import ConfigError
from dse_pages.explore import ExplorerSite, Server, command, find_table
from dse_pages.points import read_points
from dse_pages.query import MOST_DRAWN, ColumnFilter, Explorer, PageQuery, Sort, ViewWindow
from tests.browser import browsing, needs_chromium
from tests.test_pages import HOSTILE, SUMMARY, run_folder, some_points

MANY = 20_000


def explorer(count: int, texts: tuple[str, ...] = ("serial", "ring", HOSTILE)) -> Explorer:
    """An explorer of some points."""
    table = some_points(count, list(texts))
    return Explorer(read_points(pa.Table.from_pandas(table, preserve_index=False), SUMMARY))


LARGE = explorer(MANY)
IDS = {column.name: column.id for column in LARGE.points.columns}


def asked(**changes: object) -> PageQuery:
    """A question about makespan and energy."""
    x, y = IDS["makespan_s"], IDS["energy_J"]
    return PageQuery.model_validate({"x": x, "y": y, "metric": x, "sort": {"id": x}, **changes})


def test_however_many_points_there_are_a_browser_gets_few_marks_and_all_of_the_front() -> None:
    answer = LARGE.answer(asked())
    assert (answer["total"], answer["matching"]) == (MANY, MANY)
    assert len(answer["rows"]["front"]) == MOST_DRAWN
    assert sum(answer["rows"]["front"]) == LARGE.points.front.sum()
    assert sum(cell["count"] for cell in answer["grid"]) == MANY
    assert sum(answer["all"]) == sum(answer["bins"]) == MANY
    json.dumps(answer, allow_nan=False)


def test_points_with_infinite_values_are_not_drawn() -> None:
    table = some_points(MANY, ["serial"])
    table.loc[7, "makespan_s"] = np.inf
    answer = Explorer(read_points(pa.Table.from_pandas(table, preserve_index=False), SUMMARY)).answer(asked())
    assert answer["matching"] == sum(cell["count"] for cell in answer["grid"]) == MANY - 1
    json.dumps(answer, allow_nan=False)


@given(ends=st.tuples(st.floats(0, 25), st.floats(0, 25)), low=st.floats(3, 7), option=st.integers(0, 2))
def test_an_answer_counts_the_rows_that_fit(ends: tuple[float, float], low: float, option: int) -> None:
    filters = {IDS["energy_J"]: ColumnFilter(low=low), IDS["schedule.name"]: ColumnFilter(values=[option])}
    answer = LARGE.answer(asked(filters=filters, window=ViewWindow(x=ends)))
    values = LARGE.points.values
    fits = (values[IDS["energy_J"]] >= low) & (values[IDS["schedule.name"]] == option)
    fits &= (values[IDS["makespan_s"]] >= min(ends)) & (values[IDS["makespan_s"]] <= max(ends))
    assert answer["matching"] == np.count_nonzero(fits)
    assert len(answer["rows"]["keys"]) == min(MOST_DRAWN, np.count_nonzero(fits))
    drawn = answer["rows"]["values"][IDS["makespan_s"]]
    assert all(min(ends) - 1e-3 <= value <= max(ends) + 1e-3 for value in drawn)


def test_zooming_in_shows_every_point_in_the_end() -> None:
    answer = LARGE.answer(asked(window=ViewWindow(x=(1.0, 1.5))))
    assert answer["matching"] == len(answer["rows"]["keys"]) == 501
    assert answer["grid"] == []


@pytest.mark.parametrize("down", [False, True])
def test_the_best_points_come_in_order(down: bool) -> None:
    best = LARGE.answer(asked(sort=Sort(id=IDS["energy_J"], down=down)))["best"]["values"][IDS["energy_J"]]
    energy = np.sort(LARGE.points.values[IDS["energy_J"]])
    expected = energy[::-1][:25] if down else energy[:25]
    assert best == pytest.approx(expected, rel=1e-5)


def test_a_column_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="a column that there is not"):
        LARGE.answer(asked(x="c999"))
    with pytest.raises(ConfigError, match="a column that there is not"):
        LARGE.answer(asked(x=IDS["schedule.name"]))


# ---------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a table with hostile names."""
    root = tmp_path_factory.mktemp("explored")
    run_folder(root, some_points(5_000, ["serial", "ring", HOSTILE]).replace({"scenario": {"g1": HOSTILE}}))
    table = find_table(root, "sweep")
    server = Server(ExplorerSite(table, Explorer(table.points()), "token"), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def status(server: Server, path: str, method: str = "GET", host: str = "") -> int:
    """Status of the answer to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or server.hosts[0])
    connection.endheaders()
    reply = connection.getresponse()
    assert reply.headers.get("Access-Control-Allow-Origin") is None
    reply.read()
    connection.close()
    return reply.status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "host", "expected"),
    [
        ("/token/", "", 200),
        ("/token/", "evil.example", 403),
        ("/token/", "evil.example:{port}", 403),
        ("/token/", "localhost:{port}", 200),
        ("/", "", 404),
        ("/nokot/", "", 404),
        ("/token/../../etc/passwd", "", 404),
        ("/token/%2e%2e/results.parquet", "", 404),
        ("/token/rows", "", 400),
        ("/token/rows?q={}", "", 400),
        ("/token/rows?q=" + "9" * 200_000, "", 404),
    ],
)
def test_only_the_printed_address_is_served(served: Server, path: str, host: str, expected: int) -> None:
    if len(path) > 65_000:
        expected = 414  # the standard library refuses such a line before it is looked at
    assert status(served, path, host=host.format(port=served.server_port)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(served: Server, method: str) -> None:
    assert status(served, "/token/", method) == 501


@needs_chromium
@pytest.mark.slow
def test_a_browser_zooms_filters_and_finds_the_key_of_a_point(served: Server) -> None:
    with browsing() as visit:
        visit.page.on("dialog", lambda dialog: visit.complaints.append(f"dialog {dialog.message}"))
        visit.open(served.address)
        shown = visit.page.locator("#count")
        assert "5,000 of 5,000 points, 2,500 of them drawn" in shown.inner_text()
        visit.page.select_option("#choose-scenario", HOSTILE)
        visit.page.wait_for_selector("#count:has-text('1,667 of 5,000')")
        box = visit.page.locator("#scatter canvas").bounding_box()
        assert box is not None
        visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 150)
        visit.page.keyboard.down("Control")
        visit.page.mouse.wheel(0, -200)
        visit.page.keyboard.up("Control")
        visit.page.wait_for_selector("#count:not(:has-text('1,667 of'))")
        assert visit.page.locator("#points tbody tr").count() == 25
        assert visit.faults() == []
        assert visit.overhang() <= 0
        assert not visit.complaints


@pytest.mark.parametrize(
    ("words", "way"), [(["a", "b"], "compare"), (["port=x"], "free one"), (["open=maybe"], "auto, true or false")]
)
def test_words_that_make_no_sense_are_refused(words: list[str], way: str) -> None:
    with pytest.raises(ConfigError, match=way):
        command(words)


def test_without_a_run_the_newest_is_explored(tmp_path: Path) -> None:
    run_folder(tmp_path, some_points(10, ["a", "b"]))
    assert find_table(tmp_path, "").name.startswith("sweep/")
    with pytest.raises(ConfigError, match="no finished run"):
        find_table(tmp_path / "elsewhere", "")


def test_a_table_alone_is_explored_too(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, some_points(10, ["a", "b"]))
    table = find_table(tmp_path, str(folder / "results.parquet"))
    roles = {column.name: column.role for column in table.points().columns}
    assert (roles["schedule.name"], roles["makespan_s"]) == ("knob", "metric")
