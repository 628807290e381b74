"""Overrides from Python: names and values as `dse.run` takes them, in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")  # words that Hydra's grammar takes without quotes
_WORDS = frozenset({"null", "true", "false", "nan", "inf"})  # which it reads as other values


def override(name: str, value: Any) -> str:
    """One override. name: dotted path, or the same with `__` for each dot. value: a number, text, list or mapping.

    A table (a DataFrame) stands for the list of its rows. Raises TypeError for other values.

    >>> override("system__gpu__num_cus", 228)
    'system.gpu.num_cus=228'
    >>> override("system.node.link_bytes_per_s", "64 GB/s")
    "system.node.link_bytes_per_s='64 GB/s'"
    >>> override("workload.shapes", [{"name": "mine", "m": 8192}])
    'workload.shapes=[{name: mine, m: 8192}]'
    """
    return f"{name.replace('__', '.')}={_text(value)}"


def _text(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    rows = getattr(value, "to_dict", None)
    if rows is not None and hasattr(value, "columns"):  # a DataFrame, without importing pandas
        # NaN: a cell without a value
        value = [{str(name): cell for name, cell in row.items() if cell == cell} for row in rows("records")]
    item = getattr(value, "item", None)  # of a number of NumPy
    value = item() if callable(item) else value
    if value is None or isinstance(value, bool):  # before numbers, as True is an int
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value)  # all digits
    if isinstance(value, (str, Path)):
        return _quote(str(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quote(str(name))}: {_text(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_text, value)) + "]"
    raise TypeError(f"{type(value).__name__} is no value of a configuration: {value!r}")


def _quote(text: str) -> str:
    """A text that Hydra's grammar reads as this text."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # backslashes count before a quotation mark and at the end only
    escaped = re.sub(r"(\\*)(?='|$)", r"\1\1", text).replace("'", "\\'")
    return f"'{escaped}'"
