"""The notebooks of the documentation, run: `python -m benchmarks.notebooks [--record] [<notebook> ...]`.

Each runs in a fresh folder. Without `--record` its texts are compared with those that it holds; times, folders and
pictures are not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.recorded import ROOT
from benchmarks.tutorial import plain

FOLDER = ROOT / "docs" / "notebooks"
_LIMIT_S = 300


def execute(path: Path) -> Any:
    """Run a notebook; it with its outputs. Raises nbclient.exceptions.CellExecutionError where a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        metadata = {"path": folder}
        NotebookClient(notebook, timeout=_LIMIT_S, kernel_name="python3", resources={"metadata": metadata}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            for shown in (name for name in output.get("data", {}) if name.startswith("text/")):
                output.data[shown] = output.data[shown].replace(f"{Path(folder).resolve()}/", "")
    notebook.metadata.pop("language_info", None)
    return notebook


def texts(notebook: Any) -> Iterator[list[str]]:
    """Yield the lines that each output shows, without what differs from run to run."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown = output.get("data", {})
            if "image/png" not in shown:
                yield plain(shown.get("text/html", shown.get("text/plain", output.get("text", ""))))


def check(path: Path, *, record: bool) -> list[str]:
    """Run a notebook; what differs, and nothing where it is recorded."""
    import nbformat

    before: Any = nbformat.read(path, as_version=4)
    after = execute(path)
    if record:
        nbformat.write(after, path)
        return []
    pairs = zip(texts(before), texts(after), strict=True)
    return [f"{path.name}: {shown} became {now}" for shown, now in pairs if shown != now]


def main() -> int:
    """Run the notebooks; 1 where an output is not as the notebook shows it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", default=sorted(FOLDER.glob("*.ipynb")), type=Path)
    parser.add_argument("--record", action="store_true", help="keep the outputs in the notebooks")
    words = parser.parse_args()
    differences = [text for path in words.notebooks for text in check(path, record=words.record)]
    print("\n\n".join(differences) or f"{len(words.notebooks)} notebooks: every output as shown")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
