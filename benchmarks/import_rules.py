"""Check the import rules of `pyproject.toml` by import-linter, the same for every plug-in folder that there is.

    python -m benchmarks.import_rules

`lint-imports` alone checks the core. Here the packages `plugins/*/dse_*` are under the same rules, so that a new
plug-in needs no entry: a rule of all packages of the core is one of theirs as well, and in the contract `plugins` those
that no layer names are the highest layer, as strangers to one another. Output and exit code are those of
`lint-imports`.
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

_CONTRACT = "plugins"  # of what plug-ins may import
_SEPARATOR = " | "


def plugin_folders(root: Path) -> list[Path]:
    """Folders of plug-ins, in which their packages lie."""
    return sorted({package.parent for package in root.glob("plugins/*/dse_*") if package.is_dir()})


def plugin_packages(root: Path) -> list[str]:
    """Names of the packages of all plug-ins."""
    return sorted(init.parent.name for init in root.glob("plugins/*/dse_*/__init__.py"))


def strangers(layers: Sequence[str], plugins: Sequence[str]) -> str:
    """The layer of the plug-ins that no other layer names.

    >>> strangers(["(dse_b) | (dse_c)", "dse"], ["dse_a", "dse_b", "dse_c", "dse_d"])
    'dse_a | dse_d'
    """
    named = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    return _SEPARATOR.join(name for name in plugins if name not in named)


class _Reader(TomlFileUserOptionReader):
    """Reads the options of import-linter of the current folder, whose plug-ins it puts in."""

    def read_options(self, config_filename: str | None = None) -> UserOptions | None:
        options = super().read_options(config_filename)
        return None if options is None else fill_options(options, plugin_packages(Path.cwd()))


def fill_options(options: UserOptions, plugins: Sequence[str]) -> UserOptions:
    """Options with the plug-ins in the roots and in each contract that they are under."""
    session = options.session_options
    core = session["root_packages"]
    return UserOptions(
        session_options={**session, "root_packages": [*core, *plugins]},
        contracts_options=[_fill_contract(contract, core, plugins) for contract in options.contracts_options],
    )


def _fill_contract(contract: dict[str, Any], core: Sequence[str], plugins: Sequence[str]) -> dict[str, Any]:
    if contract["id"] == _CONTRACT:
        return {**contract, "layers": [strangers(contract["layers"], plugins), *contract["layers"]]}
    if contract.get("source_modules") == core:
        return {**contract, "source_modules": [*core, *plugins]}
    return contract


def main() -> int:
    """Check the rules of the current folder; 0 where all are kept, else 1."""
    sys.path[:0] = [str(Path.cwd()), *map(str, plugin_folders(Path.cwd()))]
    configure()
    settings.configure(USER_OPTION_READERS={"toml": _Reader()})
    return 0 if lint_imports(no_logo=True) else 1


if __name__ == "__main__":
    sys.exit(main())
