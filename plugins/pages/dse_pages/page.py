"""One HTML file from a template: scripts, styles and data inside, no request to any network, nothing trusted.

Templates escape every value. Only scripts whose SHA-256 the page names may run (Content Security Policy), so a name
that reached a page as a script would not run there. Styles may be inline: the charts set some on their elements.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dse.files import atomic_replacement
from dse_pages import vega

_TEMPLATES = Path(__file__).parent / "templates"
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
    "base-uri 'none'; form-action 'none'"
)
VIEWS = ("inline.js", "controls.js", "views.js")
"""Scripts of the interactive part of a page, after the library of charts."""


def view_scripts(last: str) -> list[str]:
    """All scripts of an interactive page; last: the one that begins."""
    return [vega.library(), *map(script, (*VIEWS, last))]


def script(name: str) -> str:
    """The text of one of our scripts."""
    return (_TEMPLATES / name).read_text("utf-8")


def render(template: str, content: Mapping[str, Any], *, scripts: Iterable[str] = (), connect: str = "'none'") -> str:
    """Render a page. scripts: texts that may run, in their order. connect: whom the page may ask, for its policy.

    Raises ValueError for a script that would end before its end.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    texts = tuple(scripts)
    # an HTML parser ends a script at these in the middle of a string; it also rewrites CR, which would change the hash
    if any("</script" in text.lower() or "<!--" in text or "\r" in text for text in texts):
        raise ValueError("a script must not hold </script, <!-- or a carriage return")
    environment = Environment(
        # StrictUndefined: a misspelt name in a template raises instead of leaving a gap in the page
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    policy = _POLICY.format(scripts=" ".join(map(_hash_source, texts)) or "'none'", connect=connect)
    return environment.get_template(template).render(content, scripts=texts, style=script("style.css"), policy=policy)


def to_json(value: Any) -> Any:
    """Text of JSON that may stand in a script element, as the filter `tojson` of templates writes it."""
    from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(value)


def write(path: Path, text: str) -> Path:
    """Write a page in one step, so that the earlier one stays until the new one is whole; its path."""
    with atomic_replacement(path) as fresh:
        fresh.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    return path


def _hash_source(text: str) -> str:
    # the form that Content Security Policy asks for: SHA-256 of the exact text of the element, in base64
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
