"""The command `implementations`: software that overlaps a GEMM and its collective, and where its constants are from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.config.options import list_options
from dse.errors import ConfigError, Problem, did_you_mean
from dse.results.run_folder import CommandAnswer
from simulators.steps.implementations import GROUP, Implementation, implementation

if TYPE_CHECKING:
    from rich.table import Table


def list_implementations(words: Sequence[str]) -> CommandAnswer:
    """`implementations [<name> ...]`: all in a table, or those named with each constant and its source.

    Raises ConfigError.
    """
    names = list(list_options(GROUP))
    for word in words:
        if word not in names:
            raise ConfigError([Problem(word, "is no implementation", way_out=did_you_mean(word, names))])
    chosen = [software for name in (words or names) if (software := implementation(name)) is not None]
    if words:
        parts = [part for software in chosen for part in (_head(software), _sources(software))]
        return CommandAnswer(Path(), tuple(parts))
    hint = "`python -m dse implementations <name>` shows the source of each constant; sites.ffn_in=<name> takes one"
    return CommandAnswer(Path(), (_table(chosen), hint))


def _table(chosen: Sequence[Implementation]) -> Table:
    from rich.table import Table

    shown = Table(title=f"Software that overlaps a GEMM and its collective ({GROUP})")
    for name in ("name", "software", "GPUs", "formats", "schedules", "constants"):
        shown.add_column(name, overflow="fold")
    for software in chosen:
        counts = Counter(source.provenance for source in software.sources.values())
        known = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        gpus, formats = (", ".join(values) or "all" for values in (software.gpus, software.precisions))
        schedules = "\n".join(f"{place}: {tree['schedule']}" for place, tree in software.schedules.items())
        shown.add_row(software.name, software.description, gpus, formats, schedules, known)
    return shown


def _head(software: Implementation) -> str:
    rows = f"; fitted on {len(software.fitted_on)} measured rows" if software.fitted_on else ""
    return f"{software.name}: {software.description}; in {', '.join(software.modes)}{rows}"


def _sources(software: Implementation) -> Table:
    from rich.table import Table

    shown = Table("constant", "value", "known", "source")
    tree = software.model_dump(mode="json")
    for path, source in software.sources.items():
        shown.add_row(path, _value(tree, path), source.provenance, source.source)
    return shown


def _value(tree: dict[str, Any], path: str) -> str:
    """The value at a path; what lies below it is shown at its own path."""
    node: Any = tree
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    if isinstance(node, list):
        return ", ".join(map(str, node))
    return "" if node is None or isinstance(node, dict) else str(node)
