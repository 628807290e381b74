"""Names of ranges that mark iterations."""

from __future__ import annotations

import re

# PyTorch's mark, and what training loops call their ranges; "optimizer step" is a part of one
_NAME = re.compile(r"ProfilerStep#\d+|(train(ing)?[ _])?(iteration|iter|step)[ _#:]*\d*", re.IGNORECASE)


def is_iteration(name: str) -> bool:
    """True for a range that is called as iterations are.

    >>> [is_iteration(name) for name in ("ProfilerStep#3", "iteration 12", "train_step", "optimizer step")]
    [True, True, True, False]
    """
    return bool(_NAME.fullmatch(name))
