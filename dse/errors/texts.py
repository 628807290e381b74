"""Texts on their way out: printed, recorded or raised, they hold no password and no character that steers a terminal.

A password is recognised where it stands (in the authority or the query of a URL, under a name such as `api_key`, after
an option or a sentence such as `password is`); the passwords of the words of a command line, and those of the
environment, are remembered while a command runs, so that they are hidden also where a library repeats them alone.

Standard output and standard error while a command runs: what is printed passes `printable`, whoever prints it.

A reader that goes away (`| head -1`) ends the command quietly, as SIGPIPE ends other programs; a terminal that goes
away (a closed ssh session) swallows what is printed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
_FOLDERS = ("PWD", "OLDPWD")  # of the shell, which are no passwords in spite of their names
_SECRETS = r"passw(?:or)?d|passphrase|secret|credentials?|(?:api|secret|access|private)[_ -]?key|(?<![A-Za-z0-9])pwd"
_TOKENS = r"(?<![A-Za-z0-9])token|(?:access|auth|bearer|refresh|id)token"
_NAMED = rf"(?:{_SECRETS}|{_TOKENS})"
"""Names of secrets; `tokens` is the name of a number."""
_NAME = re.compile(rf"(?i)[\w-]{{0,80}}{_NAMED}")
_MAY_BE_NAMED = re.compile(r"(?i)passw|passphrase|secret|credential|key|token|pwd")
# a bounded length, so that searching takes linear time
_START = re.compile(r"(?<![A-Za-z0-9+_.-])[A-Za-z][A-Za-z0-9+_.-]{0,40}:/{2,3}(?=[^/\s])")
_END = re.compile(r"""[\s"'<>`]|$""")
_AUTHORITY = re.compile(r"([^/@:?#]*):(.*)@", re.DOTALL)
_WITH_PORT = re.compile(r"(https?|postgresql|mysql|mssql|tcp|tls)(\+\w+)?://")
_QUERY = re.compile(rf"(?is)([?&;#]\s{{0,8}}[\w.-]{{0,80}}?{_NAMED}\s{{0,8}}=)(.*?)(?=[&;][\w.-]{{1,80}}=|$)")
_PAIR = re.compile(
    rf"""(?i)((?<![\w?&;#])["']?[\w.-]{{0,80}}?(?:{_SECRETS}|(?:{_TOKENS})(?=["']?\s{{0,8}}[=:]\s{{0,8}}["']?[^\s"']{{8}}))"""
    r"""["']?\s{0,8}[=:]\s{0,8})("[^"\n]+"|'[^'\n]+'|[^\s"',;&)}\]]+)"""
)
_DESCRIBES = (
    "a|absent|accepted|allowed|already|also|always|ambiguous|an|as|asked|at|bad|be|being|blank|by|changed|checked|denied|"
    "different|empty|expected|expired|for|from|given|hidden|ignored|in|incorrect|invalid|it|kept|known|long|longer|missing|"
    "needed|neither|never|no|none|nor|not|now|of|on|one|only|optional|out|part|plain|printed|read|refused|rejected|removed|"
    "required|reset|sent|set|short|shorter|shown|still|stored|taken|text|that|the|to|too|unchanged|unknown|unset|used|"
    "weak|what|where|with|without|written|wrong"
)
"""Words after `password is` that describe a password, and are none."""
_PROSE = re.compile(
    rf"""(?i)(\b(?:(?:{_SECRETS})|(?:{_TOKENS})(?=\s+\w+\s+(?=\S{{0,200}}[0-9])\S{{8}}))["']?\s{{1,8}}"""
    r"""(?:(?:(?:is|was|are|has\s+been|will\s+be)\s{1,8})?(?:set|changed|reset)\s{1,8}to|is|was|are|equals|being|->|→)\s{1,8})"""
    rf"""(?!(?:{_DESCRIBES})\b)("[^"\n]+"|'[^'\n]+'|[^\s"',;&)}}\]]+)"""
)
_OPTION = re.compile(
    rf"""(?i)((?<!\S)--?[\w-]{{0,40}}?(?:{_SECRETS})[\w-]{{0,20}}\s{{1,8}})((?!-)(?:"[^"\n]+"|'[^'\n]+'|[^\s"']+))"""
)
_USER = re.compile(
    r"""((?<![\w:/@.+-])(?!mailto:)[\w.%+-]{1,80}:)([^\s@:/"']{1,200})(?=@(?:localhost\b|[\w-]{1,63}(?:\.[\w-]{1,63}){1,9}))"""
)
"""A user with a password before a host, without a scheme; an image with a digest (`name:tag@sha256:...`) is none."""
_BARE = re.compile(r"[\w.%+/-]*:[^@\s:][^@\s]*@[\w.\[%-]\S*")
_NAMED_BEFORE = (_PAIR, _PROSE, _OPTION)
"""Patterns of secrets with their names in front."""
# short texts stand in many words by chance
_LEAST, _LEAST_OF_ENVIRONMENT = 4, 6  # characters of a secret that is hidden wherever it stands
_STEERS = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (
        *(code for code in range(32) if chr(code) not in "\n\t"),
        *range(0x7F, 0xA0),
        # marks of writing direction, and separators of lines
        *(0x61C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF),
        *range(0xD800, 0xE000),  # halves of UTF-16 pairs, which cannot be encoded
    )
}
_STEERING = re.compile("[" + "".join(map(re.escape, map(chr, _STEERS))) + "]")
_patterns: list[re.Pattern[str]] = []


def visible(text: str) -> str:
    r"""A text whose control characters are shown, and do nothing: those of terminals and of writing direction.

    >>> visible("\x1b[31mred")
    '\\x1b[31mred'
    """
    return text.translate(_STEERS) if _STEERING.search(text) else text


def printable(text: str) -> str:
    """A text as it may be printed: without passwords and control characters."""
    return visible(hidden(text))


def hidden(text: str) -> str:
    """A text whose URLs have lost their passwords, and whose named secrets and those that are known their values.

    >>> hidden("cannot reach postgresql://me:secret@host/x")
    'cannot reach postgresql://me:***@host/x'
    """
    for pattern in _patterns:
        text = pattern.sub(HIDDEN, text)
    if "://" in text:
        text = _without_passwords(text, to_end=False)
    if "@" in text:
        text = _USER.sub(_hide_value, text)
    if _MAY_BE_NAMED.search(text):  # a cheap look first, as every printed line comes here
        for pattern in _NAMED_BEFORE:
            text = pattern.sub(_hide_value, text)
    return text


_REDACTED = (str, Mapping, list, tuple)


def redact(tree: Any) -> Any:
    """A tree, or a text such as an override, that may be written down: without passwords and what is named a secret.

    >>> redact({"store": {"url": "postgresql://me:x@host/db"}, "api_key": "abc", "tokens": 3})
    {'store': {'url': 'postgresql://me:***@host/db'}, 'api_key': '***', 'tokens': 3}
    """
    if isinstance(tree, Mapping):
        return {
            key: HIDDEN if _is_secret(key, value) else redact(value) if isinstance(value, _REDACTED) else value
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return [redact(value) for value in tree]
    if not isinstance(tree, str):
        return tree
    name, equals, value = tree.partition("=")
    if equals and _is_secret(name, value):
        return f"{name}={HIDDEN}"
    # without a colon there is neither a URL nor a user with a password
    return hidden(_without_passwords(tree, to_end=_is_one_value(tree)) if ":" in tree else tree)


def _is_one_value(text: str) -> bool:
    """True for a text that is a URL, or gives one to a name: all of it belongs to that. Prose only mentions URLs."""
    start = _START.search(text)
    before = text[: start.start()] if start else text
    return "=" in before or not re.search(r"\s", before.strip())


def _is_secret(name: object, value: object) -> bool:
    is_value = isinstance(value, str) and bool(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    last = str(name).rpartition(".")[2]
    # `tokens: 512` is a number of tokens
    return (is_value or (is_number and "token" not in last.lower())) and _NAME.fullmatch(last) is not None


# ---------------------------------------------------------------- URLs


def ambiguous(url: str) -> str:
    """The rule that a URL breaks whose password holds a sign that libraries take for the end of it, or whose port is
    none; or "".
    """
    start = _START.match(url)
    match = _AUTHORITY.match(url[start.end() :]) if start else None
    if start and _WITH_PORT.match(url):
        rest = url[start.end() + (match.end() if match else 0) :]
        port = re.search(r":([^:\]]*)$", re.split(r"[/?#]", rest, maxsplit=1)[0])
        if port and not (re.fullmatch(r"[0-9]{0,5}", port[1]) and int(port[1] or 0) < 1 << 16):
            return f"has a port that is no number up to 65535: {port[1][:20]!r}"
    signs = r"[@\s]" if start and not start[0].startswith("http") else r"[@\s/?#]"
    if match is None or not (sign := re.search(signs, match[2])):
        return ""
    shown = {"@": "%40", "/": "%2F", "?": "%3F", "#": "%23"}.get(sign[0], "%20")
    return f"has a password with a sign that ends it in a URL: write {shown} for {sign[0]!r}, or use ~/.pgpass"


def _without_passwords(text: str, *, to_end: bool) -> str:
    """A text without the secrets of its URLs. to_end: a URL may hold blanks and quotes, and ends with the text."""
    for start, stop in reversed([*_secret_places(text, to_end=to_end)]):  # from the end, so that places stay right
        text = f"{text[:start]}{HIDDEN}{text[stop:]}"
    return text


def _secret_places(text: str, *, to_end: bool) -> Iterator[tuple[int, int]]:
    """Places of the secrets of the URLs of a text, in order and apart from one another."""
    begun, ended = 0, 0
    while match := _START.search(text, begun):
        begun = match.end()
        if match.start() < ended:
            continue  # inside the password of the one before
        end = _END.search(text, match.end())
        ended = len(text) if to_end or end is None else end.start()
        yield from ((begun + start, begun + stop) for start, stop in _places_in_url(text[match.end() : ended]))
    if to_end and begun == 0:
        value = text.partition("=")[2] or text
        if _BARE.fullmatch(value):
            place, stop = len(text) - len(value) + value.index(":") + 1, text.rindex("@")
            yield place, stop


def _places_in_url(rest: str) -> Iterator[tuple[int, int]]:
    """Places of the secrets in a URL behind its `scheme://`."""
    first = _AUTHORITY.match(rest)
    query_from = 0
    if first:
        query = re.search(r"[?#]", rest)  # a password may hold these signs, too; a query may hold an @
        is_of_query = query is not None and query.start() < first.start(2)
        if not is_of_query and first[2] != HIDDEN:  # hidden before
            yield first.span(2)
        query_from = 0 if is_of_query else first.end()
    elif (user := re.match(r"[^/@:?#\s]{16,}(?=@)", rest)) and not rest.startswith(HIDDEN):
        yield user.span()  # a token in place of a user
    for match in _QUERY.finditer(rest, query_from):
        if match[2] and match[2] != HIDDEN:
            yield match.span(2)


def _hide_value(match: re.Match[str]) -> str:
    value = match[2]
    if value.startswith(HIDDEN) or value.lower() in ("null", "none", "true", "false"):
        return match[0]
    mark = value[0] if value[0] in "\"'" else ""
    return f"{match[1]}{mark}{HIDDEN}{mark}"


# ---------------------------------------------------------------- what is known


@contextmanager
def secrets_known(words: Iterable[str]) -> Iterator[None]:
    """While it lasts, the secrets of these words, and those of the environment, are hidden wherever they stand."""
    before = _patterns[:]
    named = {name: value for name, value in os.environ.items() if name not in _FOLDERS}
    learn(named, least=_LEAST_OF_ENVIRONMENT)
    learn(list(words))
    try:
        yield
    finally:
        _patterns[:] = before  # in place: it is looked up by others


class Masks:
    """Words that stand for the secrets of texts which a library is given that would write them down."""

    def __init__(self) -> None:
        self._secrets: dict[str, str] = {}

    def put_on(self, text: str) -> str:
        """Put masks on the secrets of a text."""
        for secret in sorted({*secrets_of(text)}, key=len, reverse=True):  # longer ones first: one may hold another
            mask = f"hidden{len(self._secrets):04d}"  # a plain word, which every grammar takes
            self._secrets[mask] = secret
            learn({"password": mask})
            text = text.replace(secret, mask)
        return text

    def lifted(self, text: str) -> str:
        """Give a text its secrets back."""
        for mask, secret in self._secrets.items():
            text = text.replace(mask, secret)
        return text


def learn(tree: Any, *, least: int = _LEAST) -> None:
    """Remember the secrets of a tree or a text, those of so many characters, for as long as `secrets_known` lasts."""
    secrets = {secret for secret in secrets_of(tree) if len(secret) >= least and secret != HIDDEN}
    if forms := {form for secret in secrets for form in _forms(secret)}:
        # longer ones first: one may hold another
        escaped = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
        _patterns.append(re.compile(rf"(?<![A-Za-z0-9])(?:{escaped})(?![A-Za-z0-9])"))


def secrets_of(tree: Any) -> Iterator[str]:
    """Secrets in a tree or a text, as they stand there."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from [str(value)] if _is_secret(name, value) else secrets_of(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from secrets_of(value)
    elif isinstance(tree, str):
        name, equals, value = tree.partition("=")
        if equals and _is_secret(name.lstrip("+~-"), value):
            yield value
        to_end = _is_one_value(tree)
        yield from (tree[start:stop] for start, stop in _secret_places(tree, to_end=to_end))
        yield from (match[2] for pattern in (*_NAMED_BEFORE, _USER) for match in pattern.finditer(tree))


def _forms(secret: str) -> Iterator[str]:
    """The ways in which a secret may be written: quoted, decoded, as Python, JSON, YAML or Hydra write it."""
    plain = secret.strip("\"'")
    for text in {secret, plain, plain.rstrip("\"'}])"), unquote(plain), unquote_plus(plain)}:
        forms = (text, quote(text), quote(text, safe=""), quote_plus(text), repr(text)[1:-1], json.dumps(text)[1:-1])
        more = (text.replace("'", "''"), text.replace("'", "\\'"), text.replace("'", "'\"'\"'"), visible(text))
        yield from (form for form in (*forms, *more) if len(form) >= _LEAST)


# ---------------------------------------------------------------- streams

CLOSED_PIPE = 128 + 13  # SIGPIPE
"""Exit code where nobody reads the output any more: that of a program that SIGPIPE ended."""


class ClosedPipe(SystemExit):
    """Nobody reads the output any more; silent in a thread, as any SystemExit is."""

    def __init__(self) -> None:
        super().__init__(CLOSED_PIPE)


class ClosableStream:
    """A stream whose reader may go away. Whatever else is asked of it, the stream itself answers."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def write(self, text: str) -> int:
        """See io.TextIOBase.write. Raises ClosedPipe."""
        with self._survived():
            self.raw.write(text)
        return len(text)

    def flush(self) -> None:
        """See io.TextIOBase.flush. Raises ClosedPipe."""
        with self._survived():
            self.raw.flush()

    @contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._turn_away()
            raise ClosedPipe from None
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):  # EIO: the terminal is gone
                raise
            self._turn_away()

    def _turn_away(self) -> None:
        """Let what is left in the buffer go nowhere, or the interpreter would fail on it at its end."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.raw.fileno())
            os.close(nowhere)


class PrintableStream(ClosableStream):
    """A stream to which everything is written as `printable` makes it.

    rich_proxied_file: for consoles of rich, whose own escapes must pass; `dse.errors.terminal` cleans what they show.
    """

    def __init__(self, raw: TextIO) -> None:
        super().__init__(raw)
        self.rich_proxied_file = ClosableStream(raw)

    def write(self, text: str) -> int:
        """Write a text as it may be printed. Raises ClosedPipe."""
        super().write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts as they may be printed. Raises ClosedPipe."""
        for line in lines:
            self.write(line)


@contextmanager
def printable_streams() -> Iterator[None]:
    """While it lasts, what is printed is printable, tracebacks included."""
    before = sys.stdout, sys.stderr
    if any(isinstance(stream, PrintableStream) for stream in before):  # a command inside another one
        yield
        return
    sys.stdout, sys.stderr = (cast("TextIO", PrintableStream(stream) if stream else stream) for stream in before)
    try:
        yield
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        sys.stdout, sys.stderr = before
