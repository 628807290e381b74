"""Pages for a browser: complete, harmless whatever things are called, usable by everybody."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.first_minute import page_overflow_px
from dse.cli import main
from dse.results.run_folder import FinishedRun, Outputs, read
from dse_pages import charts, page, pictures
from dse_pages.comparison import match_points, write_comparison
from dse_pages.points import read_points
from dse_pages.report import NAME, content, write_report
from dse_pages.tables import sheet
from dse_pages.views import begin, embedded
from tests.browser import LACKING, LAPTOP, PHONE, browsing, needs_chromium
from tests.folders import finished, odd_table

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&{{7*7}}<!--"
SUMMARY = {
    "study": "sweep",
    "goals": {"makespan_s": "minimize", "energy_J": "minimize"},
    "knobs": ["schedule.name", "chunks"],
    "units": {"makespan_s": "s", "energy_J": "J", "speedup": "x"},
    "shown": ["speedup"],
    "gain": "speedup",
    "answer": "ring is 1.5x as fast as serial",
}
names = st.text(min_size=1, max_size=30) | st.sampled_from(
    [HOSTILE, "__proto__", "constructor", "a.b[0]", "c0", "\u2028"]
)


def some_points(count: int, texts: list[str]) -> pd.DataFrame:
    """Points of two scenarios with an option of some texts."""
    numbers = np.arange(count) + 1.0
    return pd.DataFrame(
        {
            "scenario": np.where(np.arange(count) % 3 == 0, "g1", "g2"),
            "key": [f"{number:032x}" for number in range(count)],
            "status": "ok",
            "reason": None,
            "engine": "event",
            "baseline": f"{0:032x}",
            "on_front": np.arange(count) % 10 == 0,
            "schedule.name": [texts[number % len(texts)] for number in range(count)],
            "chunks": pd.array([None if number % 7 == 0 else number % 5 for number in range(count)], dtype="Int64"),
            "makespan_s": numbers * 1e-3,
            "energy_J": 5 + np.sin(numbers),
            "speedup": 2.0 - numbers / count,
        }
    )


class Tags(HTMLParser):
    """Elements and attributes of a page, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Note that an element is over."""
        self.elements.append((f"/{tag}", {}))

    def handle_data(self, data: str) -> None:
        """Note the text of a script."""
        if self.elements and self.elements[-1][0] == "script":
            self.scripts.append(data)


def run_folder(root: Path, table: pd.DataFrame, **changes: Any) -> Path:
    """The folder of a finished run of a study. changes: of its summary."""
    folder = finished(root, table)
    summary = {**json.loads((folder / "summary.json").read_text()), **SUMMARY, **changes}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def hostile_folder(root: Path) -> Path:
    """A finished run in which everything has a hostile name."""
    table = some_points(60, [HOSTILE, "serial", "ring"]).replace({"scenario": {"g1": HOSTILE}})
    limits = {HOSTILE: {HOSTILE: 0.7, "link": 0.3}}
    folder = run_folder(root, table, question=f"Which {HOSTILE} wins?", limits=limits)
    record = json.loads((folder / "provenance.json").read_text())
    record |= {"command": ["python", HOSTILE], "models": {HOSTILE: HOSTILE}}
    record["facts"] = [{"path": HOSTILE, "value": HOSTILE, "provenance": "memory", "source": HOSTILE}]
    (folder / "provenance.json").write_text(json.dumps(record))
    (folder / "figures" / "timeline_x<img src=x onerror=alert(1)>.png").write_bytes(b"png")
    return folder


@given(text=names)
def test_whatever_a_name_is_it_makes_no_element_of_a_page(text: str) -> None:
    data = {"title": text, "question": text, "report": text}
    rendered = page.render("base.html", {**data, "content": None}, scripts=["let harmless = 1;"])
    tags = [tag for tag, _ in Tags(rendered).elements]
    plain = [tag for tag, _ in Tags(page.render("base.html", {"title": "x"}, scripts=["let harmless = 1;"])).elements]
    assert tags == plain


@given(texts=st.lists(names, min_size=2, max_size=5, unique=True))
def test_rows_come_out_of_a_page_as_they_went_in(texts: list[str]) -> None:
    table = some_points(2 * len(texts), texts)
    points = read_points(pa.Table.from_pandas(table, preserve_index=False), SUMMARY)
    start = begin(points)
    assert start is not None
    views = embedded(points, start)
    written = str(page.to_json(views))
    assert "<" not in written
    assert "\u2028" not in written
    back = json.loads(written)
    option = next(column for column in back["columns"] if column["name"] == "schedule.name")
    codes = back["rows"]["values"][option["id"]]
    assert [option["categories"][code] for code in codes] == table["schedule.name"].tolist()


@given(texts=st.lists(names, min_size=2, max_size=4, unique=True))
def test_names_are_never_part_of_an_expression_but_as_quoted_texts(texts: list[str]) -> None:
    table = some_points(12, texts).rename(columns={"speedup": f"x'+alert(1)+'{texts[0]}"[:60].replace("\0", "")})
    points = read_points(pa.Table.from_pandas(table, preserve_index=False), {**SUMMARY, "shown": []})
    start = begin(points)
    assert start is not None
    spec = charts.scatter(start.x, start.y, start.colour, [])
    expressions = re.findall(r'"(?:labelExpr|test|signal)": "((?:[^"\\]|\\.)*)"', json.dumps(spec))
    assert expressions
    bare = [re.sub(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'', "", json.loads(f'"{text}"')) for text in expressions]
    assert not [text for text in bare if "alert" in text]


def test_only_named_scripts_may_run_and_nothing_may_be_asked_for() -> None:
    text = page.render("base.html", {"title": "x"}, scripts=["let one = 1;", "let two = 2;"])
    policy = next(attributes["content"] for tag, attributes in Tags(text).elements if "http-equiv" in attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for script in Tags(text).scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe-eval" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("script", ["</script>", "</SCRIPT >", "<!-- x", "a\rb"])
def test_a_script_that_would_end_early_is_refused(script: str) -> None:
    with pytest.raises(ValueError, match="must not hold"):
        page.render("base.html", {"title": "x"}, scripts=[script])


def test_a_figure_is_in_the_page_as_the_smaller_of_its_files(tmp_path: Path) -> None:
    from PIL import Image

    Image.effect_noise((200, 200), 80).convert("RGB").save(tmp_path / "noise.png")
    (tmp_path / "noise.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><circle r="1"/></svg>')
    Image.new("RGB", (200, 200)).save(tmp_path / "plain.png")
    (tmp_path / "plain.svg").write_text("<svg>" + "<g/>" * 9000 + "</svg>")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    broken, noise, plain = pictures.pictures(tmp_path, tmp_path)
    assert noise.source.startswith("data:image/svg+xml,")
    assert plain.source.startswith("data:image/webp;base64,")
    assert (broken.source, broken.links) == ("", ("broken.png",))


def test_figures_beyond_what_a_page_may_hold_are_linked(tmp_path: Path) -> None:
    for name, size in (("small", 10), ("large", 4000)):
        (tmp_path / f"{name}.svg").write_text("<svg>" + "<g/>" * size + "</svg>")
    large, small = pictures.pictures(tmp_path, tmp_path, most=1000)
    assert (bool(small.source), bool(large.source)) == (True, False)
    assert large.links == ("large.svg",)


def test_a_table_of_the_terminal_is_the_same_in_a_page() -> None:
    from rich.table import Table

    shown = Table(title="what won")
    shown.add_column("scenario")
    shown.add_column("gain", justify="right")
    shown.add_row("g1", "1.51x")
    assert sheet(shown).rows == (("g1", "1.51x"),)
    assert sheet(shown).numeric == (False, True)


def test_a_site_without_a_schedule_reads_serial() -> None:
    table = pa.table({"scenario": ["a", "a"], "sites.ffn_in": ["flux", None], "sites.other": ["x", None]})
    points = read_points(table, {"declared": {"sites.ffn_in": "serial", "sites.other": "y"}})
    assert {c.name: c.categories for c in points.columns[1:]} == {
        "sites.ffn_in": ("flux", "serial"),
        "sites.other": ("x", "–"),
    }


def test_titles_of_columns_are_words_and_never_the_same_twice() -> None:
    table = some_points(20, ["a", "b"]).assign(**{"other.chunks": 3})
    points = read_points(pa.Table.from_pandas(table, preserve_index=False), SUMMARY)
    titles = [column.title for column in points.columns]
    assert {"scenario", "schedule", "makespan", "energy", "speed-up", "chunks"} == set(titles)
    varying = table.assign(**{"other.chunks": np.arange(20)})
    columns = read_points(pa.Table.from_pandas(varying, preserve_index=False), SUMMARY).columns
    assert {"chunks", "other.chunks"} <= {column.title for column in columns}


@pytest.mark.slow
def test_a_report_holds_the_command_the_sources_and_no_recollection_as_published(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, some_points(60, ["serial", "ring"]))
    claim = {"id": "x.y", "statement": "s", "source": "where", "unit": "x", "kind": "max", "published": 4.25}
    claim |= {"ours": 4.0, "error": -0.06, "within": False, "basis": "predicted", "reason": "because", "flips": None}
    rows = [{**claim, "provenance": "memory"}, {**claim, "id": "x.z", "published": 7.75, "provenance": "abstract"}]
    (folder / "claims.json").write_text(json.dumps(rows))
    text = write_report(Outputs(folder)).read_text()
    assert "python -m dse study=sweep" in text
    assert "7.75 x" in text
    assert "4.25" not in text
    assert "because" in text
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text.partition("<script>")[0])


@pytest.mark.more
@pytest.mark.usefixtures("charts")
def test_a_report_of_odd_points_is_written_and_shows_those_with_a_result(tmp_path: Path) -> None:
    outputs = Outputs(run_folder(tmp_path, odd_table(), gain=""))
    shown = content(outputs)["content"]
    assert len(shown["rows"]["front"]) == 4
    assert write_report(outputs).name == NAME


@pytest.mark.nightly
def test_a_long_table_is_shown_in_part_and_the_page_says_so(tmp_path: Path) -> None:
    outputs = Outputs(run_folder(tmp_path, some_points(40_000, ["serial", "ring"])))
    shown = content(outputs)
    assert len(shown["content"]["rows"]["front"]) < 6000
    assert "of 40,000 rows" in shown["note"]
    assert "dse results show sweep" in shown["note"]
    assert write_report(outputs).stat().st_size < 3e6


# ---------------------------------------------------------------- in a browser


@pytest.mark.more
def test_a_study_ends_with_a_report_that_has_what_the_terminal_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["workload.only=[g4]", "space.schedule.num_chunks=choice(2,4)", "store=none", "tracking=none"]
    assert main(["study=ficco_sweep", *small, "figures=none", "executor.jobs=1"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("report.html has all of this in full")
    run = Path("outputs/ficco_sweep/latest")
    text, facts = (run / NAME).read_text("utf-8"), json.loads((run / "provenance.json").read_text("utf-8"))
    unsure = [fact["path"] for fact in facts["facts"] if fact["provenance"] in ("memory", "assumed")]
    assert unsure and all(path in text for path in unsure)
    assert "Kendall tau" in text and "came onto a front" in text
    assert "Speed-ups on this page are over the baseline: serial by CUs" in text
    assert "_x" not in "".join(re.findall(r"<label[^>]*>[^<]*", text))
    if not LACKING:
        assert page_overflow_px(run / NAME) == 0
    (run / NAME).unlink()
    assert main(["results", "report", "study=ficco_sweep"]) == 0
    assert (run / NAME).is_file()
    assert list((run / "figures").glob("timeline_*.json"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a report in which everything has a hostile name."""
    return write_report(Outputs(hostile_folder(tmp_path_factory.mktemp("hostile")))).as_uri()


@needs_chromium
@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [PHONE, LAPTOP])
def test_a_browser_shows_a_report_without_a_complaint_whatever_its_names(hostile: str, size: tuple[int, int]) -> None:
    with browsing(size) as visit:
        visit.page.on("dialog", lambda dialog: visit.complaints.append(f"dialog {dialog.message}"))
        visit.open(hostile)
        assert not visit.complaints
        assert [address for address in visit.requests if not address.startswith("data:")] == [hostile]
        assert int(visit.page.get_attribute("html", "data-drawn") or 0) > 60
        assert visit.overhang() <= 0
        assert HOSTILE in visit.page.inner_text("h1")
        assert visit.page.get_by_text("What the columns mean").first.is_visible()
        if size == LAPTOP:  # a phone shows rows as cards, without a line of headings
            (column := visit.page.locator("abbr", has_text="limited by").first).focus()
            assert "winner's time" in str(column.evaluate("it => getComputedStyle(it, '::after').content"))


@needs_chromium
@pytest.mark.slow
def test_a_report_has_no_serious_fault_of_accessibility(hostile: str) -> None:
    with browsing() as visit:
        visit.open(hostile)
        assert visit.faults() == []
        visit.page.click("text=Filter by any knob or metric")
        assert visit.faults() == []


def drag_along_first_axis(shown: Page) -> None:
    """Drag over the upper half of the first axis of the parallel coordinates: the first place whose cursor says so."""
    shown.locator("#parallel").scroll_into_view_if_needed()
    box = shown.locator("#parallel canvas").bounding_box()
    assert box is not None
    for across in range(0, int(box["width"]), 8):
        shown.mouse.move(box["x"] + across, box["y"] + 60)
        if shown.evaluate("document.getElementById('parallel').style.cursor") == "ns-resize":
            break
    shown.mouse.down()
    shown.mouse.move(box["x"] + across, box["y"] + 100, steps=4)
    shown.mouse.up()


@pytest.mark.more
@needs_chromium
def test_scenario_option_filter_and_brush_choose_the_points_of_all_charts(hostile: str) -> None:
    from playwright.sync_api import expect

    with browsing() as visit:
        visit.open(hostile)
        shown = visit.page.locator("#count")
        assert "20 of 60" in shown.inner_text()
        visit.page.select_option("#choose-scenario", "g2")
        expect(shown).to_contain_text("40 of 60")
        visit.page.select_option("#choose-option", "ring")
        expect(shown).to_contain_text(re.compile("^(?!40)"))
        visit.page.click("#reset")
        expect(shown).to_contain_text("60 of 60")
        drag_along_first_axis(visit.page)
        expect(shown).not_to_contain_text("60 of 60")
        visit.page.select_option(
            "#choose-colour", visit.page.locator("#choose-colour option").last.get_attribute("value")
        )
        assert not visit.complaints


@pytest.mark.more
@needs_chromium
def test_a_printed_report_has_figures_in_place_of_what_moves(hostile: str) -> None:
    with browsing() as visit:
        visit.open(hostile)
        visit.page.emulate_media(media="print")
        assert not visit.page.locator("#scatter").is_visible()
        assert visit.page.locator("figure.only-print img").is_visible()
        assert visit.overhang() <= 0


# ---------------------------------------------------------------- two runs


def two_runs(root: Path) -> tuple[FinishedRun, FinishedRun]:
    """Two finished runs, of which the second has fewer points, each half as long."""
    first, second = (root / name for name in ("first", "second"))
    table = some_points(60, [HOSTILE, "ring", "serial", "x", "y", "z", "v"]).drop_duplicates(
        ["scenario", "schedule.name", "chunks"]
    )
    slower = table.iloc[5:].assign(makespan_s=lambda rows: rows["makespan_s"] / 2)
    folders = (run_folder(first, table), run_folder(second, slower))
    return FinishedRun(folders[0]), FinishedRun(folders[1])


def test_points_of_two_runs_match_by_scenario_and_knobs(tmp_path: Path) -> None:
    first, second = two_runs(tmp_path)
    matches = match_points(first, second)
    assert len(matches) == len(read(second, ["key"]))
    assert matches["makespan, B over A"].to_numpy() == pytest.approx(0.5)
    assert matches["energy (A)"].to_numpy() == pytest.approx(matches["energy (B)"].to_numpy())


@pytest.mark.more
@needs_chromium
def test_a_browser_shows_two_runs_side_by_side_whatever_their_names(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    printed = ["A = a\nB = b", f"made otherwise: {HOSTILE}"]
    path = write_comparison(tmp_path / "page", two_runs(tmp_path), printed)
    with browsing(PHONE) as visit:
        visit.open(path.as_uri())
        assert not visit.complaints
        assert visit.faults() == []
        assert visit.overhang() <= 0
        assert HOSTILE in visit.page.inner_text("main")


@pytest.mark.slow
def test_a_study_survives_where_the_engine_of_charts_cannot_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, some_points(30, ["serial", "ring"]))
    code = (
        "import resource, sys, pathlib; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30));"
        "from dse_pages.report import write_report; from dse.results.run_folder import Outputs;"
        "write_report(Outputs(pathlib.Path(sys.argv[1])))"
    )
    command, variables = [sys.executable, "-c", code, str(folder)], {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = (folder / NAME).read_text()
    way = "ulimit -v" if find_spec("vl_convert") else "pip install 'overlap-dse-pages[charts]'"
    assert re.search(rf"The interactive charts are left out: [^.]*{re.escape(way)}", html.unescape(text))
    assert "<script" not in text
