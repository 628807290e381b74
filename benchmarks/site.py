"""Hooks of the documentation site (`mkdocs.yml`): pages made from the code, notebooks as pages, links into the clone.

A page below `docs/` links to other files of the repository as a clone has them. On the site, those in `PROJECT`, the
pages of plug-ins among them, are pages of their own, and others are shown as their path.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import claims, gallery, reference
from tests.campaigns import faults

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PLUGINS = {
    f"plugins/{path.parent.name}/README.md": f"plugins/{path.parent.name}.md"
    for path in sorted(ROOT.glob("plugins/*/README.md"))
}
PROJECT = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    **PLUGINS,
    "README.md": "index.md",
}
"""File of the repository -> its page."""
_HEADING = re.compile(r"^(#{2,4} )([^`\n]+) \((`[^\n]*)\)$", re.MULTILINE)
"""A heading that names the modules, which the table of contents leaves out."""
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)*)\]\(((?!\w+:|#)[^)\s]+)\)")
"""A link; a backtick begins code and nothing else, or brackets that stay open would be tried in every way."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of plug-ins into the section of their name."""
    (section,) = (each["Plug-ins"] for each in config.nav or () if "Plug-ins" in each)
    section += [page for page in PLUGINS.values() if page not in section]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code, from notebooks and from files of the repository."""
    from mkdocs.structure.files import File

    pages = {**reference.pages(), **made_pages(), **_project_pages(), **_notebook_pages()}
    for path, text in pages.items():
        if path not in files.src_uris:
            files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave `docs/` at pages of the site, or show where they lead in the repository."""
    short = _HEADING.sub(r'\1\2 (\3) { data-toc-label="\2" }', markdown)
    return with_site_links(short, f"docs/{page.file.src_uri}")


def with_site_links(text: str, place: str) -> str:
    """Markdown of the page at `place` of the repository, with links to what the site has.

    >>> with_site_links("[peers](../../plugins/peers/README.md), [conf](../../conf/config.yaml)", "docs/how-to/gpu.md")
    '[peers](../plugins/peers.md), conf (`conf/config.yaml`)'
    """
    folder = posixpath.dirname(place)

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in PROJECT:
            shown = posixpath.relpath(f"docs/{PROJECT[path]}", folder)
        elif path.startswith("docs/") and not (ROOT / path).is_dir():
            shown = posixpath.relpath(path, folder)
        else:
            return f"{match[1]} (`{path}`)"
        return f"[{match[1]}]({shown}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(link, text)


def made_pages() -> dict[str, str]:
    """Pages of recorded runs: path below `docs/` -> Markdown."""
    return {
        "gallery.md": gallery.page(),
        "explanation/claims.md": claims.report(claims.records()),
        "explanation/faults.md": faults.page(),
    }


def _project_pages() -> dict[str, str]:
    """Files of the repository as pages; their links are made to start from where the page is, as in a clone."""
    return {path: _moved(ROOT / name, path) for name, path in PROJECT.items() if path != "index.md"}


def _moved(file: Path, path: str) -> str:
    """Text of a file of the repository, links and pictures as seen from its page at `path` below `docs/`."""
    back = posixpath.relpath(str(file.parent.relative_to(ROOT)), posixpath.dirname(f"docs/{path}"))
    text = _LINK.sub(lambda match: f"[{match[1]}]({posixpath.join(back, match[2])})", file.read_text("utf-8"))
    return re.sub(r"!\[([^\]]*)\]\(\S*?docs/images/", r"![\1](../images/", text)


def _notebook_pages() -> dict[str, str]:
    """Notebooks as pages, with the outputs that they hold."""
    paths = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    return {f"notebooks/{path.stem}.md": notebook_page(path) for path in paths}


def notebook_page(path: Path) -> str:
    """Markdown of a notebook."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    parts = [part for cell in cells for part in _cell(cell)]
    return "\n\n".join([*parts, f"[Download this notebook]({path.name})", ""])


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" in data:
            yield f'<img alt="figure" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
        elif "text/html" in data:
            table = re.sub(r"<style.*?</style>|\n\s*", "", "".join(data["text/html"]), flags=re.DOTALL)
            yield f'<div class="output">{table}</div>'
        else:
            text = "".join(data.get("text/plain", output.get("text", "")))
            yield f'<pre class="output">{html.escape(text)}</pre>'
