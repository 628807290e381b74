"""Check the import rules of `pyproject.toml` by import-linter, the same for every plug-in folder that there is.

    python -m benchmarks.import_rules

The word `plugins` in `[tool.importlinter]` stands for the packages `plugins/*/dse_*`, so a new plug-in needs no entry.
In a list of packages it stands for all of them; among layers for those that no layer names, as strangers to one
another. Output and exit code are those of `lint-imports`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from importlinter.adapters.user_options import TomlFileUserOptionReader
from importlinter.application.app_config import settings
from importlinter.application.use_cases import lint_imports
from importlinter.application.user_options import UserOptions
from importlinter.configuration import configure

PLACEHOLDER = "plugins"
_SEPARATOR = " | "


def plugin_folders(root: Path) -> list[Path]:
    """Folders of plug-ins, in which their packages lie."""
    return sorted({package.parent for package in root.glob("plugins/*/dse_*") if package.is_dir()})


def plugin_packages(root: Path) -> list[str]:
    """Names of the packages of all plug-ins."""
    return sorted(init.parent.name for init in root.glob("plugins/*/dse_*/__init__.py"))


def fill_packages(packages: Sequence[str], plugins: Sequence[str]) -> list[str]:
    """A list of packages with the plug-ins in place of the placeholder.

    >>> fill_packages(["dse", "plugins"], ["dse_a", "dse_b"])
    ['dse', 'dse_a', 'dse_b']
    """
    names = [name for name in packages if name != PLACEHOLDER]
    return [*names, *plugins] if PLACEHOLDER in packages else names


def fill_layers(layers: Sequence[str], plugins: Sequence[str]) -> list[str]:
    """Layers with the plug-ins that no layer names in place of the placeholder.

    >>> fill_layers(["plugins", "dse_b | dse_c", "dse"], ["dse_a", "dse_b", "dse_c", "dse_d"])
    ['dse_a | dse_d', 'dse_b | dse_c', 'dse']
    """
    named = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    strangers = _SEPARATOR.join(name for name in plugins if name not in named)
    return [strangers if layer == PLACEHOLDER else layer for layer in layers if layer != PLACEHOLDER or strangers]


class _Reader(TomlFileUserOptionReader):
    """Reads the options of import-linter of the current folder, whose plug-ins it puts in."""

    def read_options(self, config_filename: str | None = None) -> UserOptions | None:
        options = super().read_options(config_filename)
        return None if options is None else fill_options(options, plugin_packages(Path.cwd()))


def fill_options(options: UserOptions, plugins: Sequence[str]) -> UserOptions:
    """Options with the plug-ins in place of the placeholder, in the roots and in each contract."""
    session = options.session_options
    return UserOptions(
        session_options={**session, "root_packages": fill_packages(session["root_packages"], plugins)},
        contracts_options=[_fill_contract(contract, plugins) for contract in options.contracts_options],
    )


def _fill_contract(contract: dict[str, Any], plugins: Sequence[str]) -> dict[str, Any]:
    filled = dict(contract)
    if "source_modules" in contract:
        filled["source_modules"] = fill_packages(contract["source_modules"], plugins)
    if "layers" in contract:
        filled["layers"] = fill_layers(contract["layers"], plugins)
    return filled


def main() -> int:
    """Check the rules of the current folder; 0 where all are kept, else 1."""
    sys.path[:0] = [str(Path.cwd()), *map(str, plugin_folders(Path.cwd()))]
    configure()
    settings.configure(USER_OPTION_READERS={"toml": _Reader()})
    return 0 if lint_imports(no_logo=True) else 1


if __name__ == "__main__":
    sys.exit(main())
