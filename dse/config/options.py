"""Options of configuration groups, shipped and the user's own, with their descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from dse.config.catalogues import listed
from dse.config.yaml_checks import LOADER, load_yaml, unreadable
from dse.files import read_text

_NAMES = ("description", "question")  # of what an option says of itself


def conf_dir() -> Path:
    """The shipped configuration: `conf/` of a clone, `dse/conf/` of an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    clone = package.parent / "conf"
    return clone if (clone / "config.yaml").is_file() else package / "conf"


def list_options(group: str, folders: Sequence[Path] = ()) -> dict[str, str]:
    """Options of a group with their descriptions, those of its catalogue after those that have a file."""
    files = {path.stem: path for folder in (conf_dir(), *folders) for path in sorted((folder / group).glob("*.yaml"))}
    described = {name: _description(path) for name, path in sorted(files.items())}
    return described | {name: text for name, text in listed(group).items() if name not in described}


def _description(path: Path) -> str:
    """Description of an option: of a shipped one the text is enough, one of the user's own is checked and read."""
    if conf_dir() in path.parents:
        return _shipped_description(path)
    if unreadable(path):
        return "(cannot be read)"
    tree = load_yaml(path)
    study = tree.get("study", tree) if isinstance(tree, dict) else {}
    texts = (study.get(name) for name in _NAMES) if isinstance(study, dict) else ()
    return str(next(filter(None, texts), None) or _comment(path))


def _shipped_description(path: Path) -> str:
    """The first scalar called `description`, or `question` of a study, read no further than that."""
    text = path.read_text("utf-8")
    if not any(f"{name}:" in text for name in _NAMES):
        return _comment(path)
    events = yaml.parse(text, Loader=LOADER)
    scalars = (event.value for event in events if isinstance(event, yaml.ScalarEvent))
    for value in scalars:
        if value in _NAMES:
            return str(next(scalars, ""))
    return _comment(path)


def _comment(path: Path) -> str:
    """The comment that a file begins with, below its directives: of an option of another section."""
    lines = (line for line in read_text(path, str(path)).splitlines() if not line.startswith("# @"))
    first = next(lines, "")
    return first.removeprefix("# ") if first.startswith("# ") else ""
