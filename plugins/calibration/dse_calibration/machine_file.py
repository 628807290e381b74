"""The file of a machine that a calibration writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from dse.files import atomic_replacement
from dse.results.run_folder import Outputs, writable


def write_machine(tree: Mapping[str, Any], outputs: Outputs) -> None:
    """Write the file of a machine into a folder, which is made. Raises ConfigError where it cannot be."""
    writable(str(outputs.folder))
    text = yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=120)
    with atomic_replacement(outputs.folder / f"{tree['name']}.yaml") as fresh:
        fresh.write_text(text, encoding="utf-8")
