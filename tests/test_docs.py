"""The documentation: it is complete, its links lead somewhere, its commands print what it shows."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from benchmarks import claims, gallery, notebooks, reference, site, tutorial
from dse import plugins
from dse.config.options import list_options
from dse.study.settings import Settings
from dse.values import LABELS
from simulators.hardware.machine import System
from tests.passes import research_folders
from tests.support import REPOSITORY

README = REPOSITORY / "README.md"
PAGES = [README, *(REPOSITORY / name for name in site.PROJECT), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def test_the_readme_is_short_and_its_table_of_trust_is_that_of_the_records() -> None:
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 80
    assert text == claims.with_trust(text, claims.records())


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no lines"):
        claims.with_trust("a page", claims.records())


@functools.cache
def _reference() -> dict[str, str]:
    return reference.pages()


@pytest.mark.slow
def test_links_of_a_clone_lead_to_files() -> None:
    """Pages that the site makes are no files of a clone."""
    generated = {*reference.makers(), *site.made_pages()}
    absent = {  # plug-ins whose pages of reference are not made here
        folder.parent for folder in REPOSITORY.glob("plugins/*/dse_*") if not plugins.places(folder.name)
    }
    for page in (page for page in PAGES if page.parent not in absent):
        for target in re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", page.read_text("utf-8")):
            place = (page.parent / target).resolve()
            name = place.relative_to(REPOSITORY / "docs").as_posix() if REPOSITORY / "docs" in place.parents else ""
            notebook = place.parent.name == "notebooks" and place.with_suffix(".ipynb").exists()
            assert place.exists() or name in generated or notebook, f"{page}: {target}"


def test_every_file_of_the_documentation_that_the_code_names_exists() -> None:
    folders = ("dse", "simulators", "search_spaces", "studies", "benchmarks", "validation", "conf", "plugins")
    files = [path for name in folders for kind in ("py", "yaml") for path in (REPOSITORY / name).rglob(f"*.{kind}")]
    texts = {path: path.read_text("utf-8") for path in files if "data" not in path.parts}
    named = {name for text in texts.values() for name in re.findall(r"(?<![\w/.])docs/[a-z/-]+\.md", text)}
    assert {name for name in named if not (REPOSITORY / name).exists()} <= {"docs/performance.md"}  # of another project


def _fields(kind: type[BaseModel]) -> Iterator[str]:
    yield from (name for name in kind.model_fields if name not in LABELS)


@pytest.mark.more
@pytest.mark.parametrize(("page", "kind"), [("settings", Settings), ("hardware", System)])
def test_every_field_has_a_row(page: str, kind: type[BaseModel]) -> None:
    text = _reference()[f"reference/fields/{page}.md"]
    kinds, rows = [kind], set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    for model in kinds:
        names = list(_fields(model))
        assert rows >= set(names), model
        kinds += [k for name in names for k in reference._models(model.model_fields[name].annotation) if k not in kinds]


@pytest.mark.slow
def test_every_option_command_and_machine_is_in_the_reference() -> None:
    pages = _reference()
    for group in plugins.declarations("GROUPS"):
        assert f"{{ #{group} }}" in pages["reference/options.md"]
    for name in plugins.names("command"):
        assert f"## {name}\n" in pages["reference/commands.md"]
    for name in list_options("system"):
        assert f"[`{name}`]({name}.md)" in pages["reference/machines/index.md"]
        assert "| provenance |" in pages[f"reference/machines/{name}.md"]


@pytest.mark.slow
def test_the_two_shelves_of_plug_ins_are_those_of_the_code() -> None:
    text = (REPOSITORY / "docs/explanation/architecture.md").read_text("utf-8")
    shelves = text.partition("## Two shelves of plug-ins")[2].partition("## The way of one point")[0]
    supported, research = re.findall(r":\s([a-z_,\s]+)\.", shelves)
    studied = {folder.name for folder in research_folders()}
    folders = {folder.name for folder in (REPOSITORY / "plugins").iterdir() if (folder / "pyproject.toml").exists()}
    assert set(re.split(r",\s+", research)) == studied
    assert set(re.split(r",\s+", supported)) == folders - studied


def test_every_study_is_in_the_gallery_with_a_small_picture_and_among_the_questions() -> None:
    page, questions = gallery.page(), (REPOSITORY / "docs" / "start" / "questions.md").read_text("utf-8")
    for study, question in list_options("study").items():
        assert f"## {study}\n\n**{question}**" in page
        assert f"`{study}`" in questions or f"study={study}" in questions
    shipped = {
        path.stem for place in (".", "plugins/*/dse_*") for path in REPOSITORY.glob(f"{place}/conf/study/*.yaml")
    }
    for picture in gallery.FOLDER.glob("*.png"):
        assert picture.stat().st_size <= gallery.MOST_BYTES
        assert picture.stem in shipped


def test_the_citation_has_what_its_format_requires() -> None:
    tree = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))
    assert tree["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(tree)
    assert tree["authors"] == [{"name": "The dse authors"}]


def test_the_way_of_a_newcomer_takes_at_most_six_commands() -> None:
    text = README.read_text("utf-8")
    typed = [command for block in tutorial.blocks(text) for command, _ in tutorial.commands(block.body)]
    targets = re.findall(r"^make (\w+)", text, re.MULTILINE)
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    assert targets == ["sweep", "test"]
    assert all(re.search(rf"^{target}: (setup|check) ##", makefile, re.MULTILINE) for target in targets)
    assert re.search(r"^check: setup ##", makefile, re.MULTILINE)
    assert 1 <= len(typed) <= 5
    assert any("workload.shapes=my.csv" in command and "system=my_gpu" in command for command in typed)


def test_outputs_are_compared_without_times_and_folders() -> None:
    assert tutorial.matches("a\n...\nz", "a\nb\nc\nz")
    assert tutorial.matches("written to outputs/x/2026-11-24_09-53-50/", "written to outputs/x/2027-01-02_03-04-05_1/")
    assert not tutorial.matches("speed-up 1.62x", "speed-up 1.63x")
    assert not tutorial.matches("a\n...", "b\na")
    assert tutorial.select("1\n2\n3\n4", "1, -1") == "1\n...\n4"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.more if page == "README.md" else pytest.mark.nightly)
        for page in tutorial.PAGES
    ],
)
def test_commands_of_a_page_print_what_it_shows(page: str) -> None:
    assert tutorial.check(REPOSITORY / page, record=False) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(path.name for path in notebooks.FOLDER.glob("*.ipynb")))
def test_a_notebook_runs_and_shows_what_it_holds(name: str) -> None:
    assert notebooks.check(notebooks.FOLDER / name, record=False) == []


class _Loaded(HTMLParser):
    """Addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(values.get("src") or "")
        elif tag == "link" and values.get("rel") != "canonical":
            self.addresses.append(values.get("href") or "")


@pytest.mark.nightly
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in tmp_path.rglob("*.html"):
        parser = _Loaded()
        parser.feed(page.read_text("utf-8"))
        assert not [address for address in parser.addresses if re.match(r"(\w+:)?//", address)], page
    styles = "".join(path.read_text("utf-8") for path in tmp_path.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", styles)
