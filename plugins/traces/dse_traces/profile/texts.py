"""Texts of profiles as they may be kept and printed: names of kernels, GPUs, groups and files come from strangers."""

from __future__ import annotations

import re

MOST_TEXT = 1 << 14
"""Characters of a name: full signatures of C++ have some thousand."""
# control characters, marks of direction, blanks without width, and halves of surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def legal_text(text: str) -> str:
    r"""A text that any terminal and table bears: control characters and halves of characters are written out.

    >>> legal_text("gemm\x1b[31m"), legal_text("a\ud800")
    ('gemm\\x1b[31m', 'a\\ud800')
    """
    # most names are plain: isprintable() is faster than the expression
    plain = text if text.isprintable() else _UNPRINTABLE.sub(_escape, text)
    return plain if len(plain) <= MOST_TEXT else f"{plain[:MOST_TEXT]}..."


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
