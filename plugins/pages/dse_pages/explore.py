"""Every point of a table in a browser, up to a million of them: the command `results show`.

A server on 127.0.0.1 holds the table and answers questions of one page (`dse_pages.query`). Other pages of the browser
cannot ask it: addresses begin with a token that only the printed one has, the Host header must be this machine's own
(so no name that points here is served), nothing is shared across origins, and only GET is answered.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError

from dse.errors import ConfigError, Problem, pairs
from dse.errors.parsing import whole_number
from dse.results import output_files
from dse.results.run_folder import FinishedRun
from dse_pages import page, vega
from dse_pages.points import PagePoints, read_points
from dse_pages.query import Explorer, PageQuery
from dse_pages.views import begin, content

# texts that no chart shows: not read, as a million of them take memory and time
_UNSHOWN = ("reason", "engine", "baseline")
_MOST_QUESTION = 100_000  # characters of an address
# the browser neither guesses a type, frames the page, sends its address on, nor keeps rows on disk
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class ExplorerTable:
    """A table to explore. name: for people."""

    name: str
    path: Path
    summary: Mapping[str, Any]

    def points(self) -> PagePoints:
        """Its rows. Raises ConfigError where the table is damaged."""
        with output_files.table(self.path) as table:
            names = [name for name in table.names if name not in _UNSHOWN]
            return read_points(table.whole(names), self.summary)


@dataclass(frozen=True)
class ExplorerSite:
    """All that the server answers. token: the first part of every address."""

    table: ExplorerTable
    explorer: Explorer
    token: str

    @cached_property
    def page(self) -> bytes:
        """The page, without rows: it asks for them. Raises ConfigError where there are no two numbers to draw."""
        points = self.explorer.points
        start = begin(points)
        if start is None:
            raise ConfigError([Problem("run", "has no two columns of numbers to draw", self.table.name)])
        views = {**content(points, start), "address": f"/{self.token}/rows"}
        shown: dict[str, Any] = {
            "title": f"Explore {self.table.name}",
            "name": self.table.name,
            "path": str(self.table.path),
        }
        shown |= {"total": len(points), "start": views["start"], "content": views}
        scripts = page.view_scripts("served.js")
        return page.render("explore.html", shown, scripts=scripts, connect="'self'").encode("utf-8", "replace")

    def rows(self, text: str) -> bytes:
        """The answer to a question. Raises ConfigError, ValidationError."""
        answer = self.explorer.answer(PageQuery.model_validate_json(text))
        return json.dumps(answer, allow_nan=False).encode()


class Server(ThreadingHTTPServer):
    """A site on 127.0.0.1."""

    # an open connection of a browser does not hold up the end by Ctrl-C
    daemon_threads = True

    def __init__(self, site: ExplorerSite, port: int) -> None:
        self.site = site
        # the loopback address alone: other machines of the network cannot connect
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of this server that a browser may use."""
        return tuple(f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost"))

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"http://{self.hosts[0]}/{self.site.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "dse", ""

    def do_GET(self) -> None:
        """Answer with the page or with rows; anything else is not there."""
        # DNS rebinding: a foreign name that resolves to 127.0.0.1 arrives with that name in Host
        if self.headers.get("Host", "") not in self.server.hosts:
            return self._answer(403, b"this server is for 127.0.0.1 only", "text/plain")
        parts, site = urlsplit(self.path), self.server.site
        token, _, rest = parts.path.removeprefix("/").partition("/")
        # compared in constant time, as the duration of a plain comparison would betray the token letter by letter
        if len(self.path) > _MOST_QUESTION or not hmac.compare_digest(token.encode(), site.token.encode()):
            return self._answer(404, b"not here: open the address that was printed", "text/plain")
        try:
            if rest == "":
                return self._answer(200, site.page, "text/html")
            if rest == "rows":
                return self._answer(200, site.rows(parse_qs(parts.query).get("q", [""])[0]), "application/json")
        # the reason is not repeated: it would hold text of the request
        except (ConfigError, ValidationError):
            return self._answer(400, b"not understood", "text/plain")
        return self._answer(404, b"not here", "text/plain")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print no line for each request."""


def find_table(root: Path, run: str) -> ExplorerTable:
    """The table that is meant by a file, a folder, `<study>` or `<study>/<time>`; "" is the newest run of all.

    Raises ConfigError where there is none.
    """
    if not run:
        links = [path for path in root.glob("*/latest/results.parquet") if path.is_file()]
        newest = max(links, key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest is None:
            way = "run a study first, or name a results.parquet"
            raise ConfigError([Problem("run", f"has no finished run below {root}/", way_out=way)])
        run = newest.parent.parent.name
    # a table alone has no summary: no goals and no units are known
    if run.endswith(".parquet"):
        return ExplorerTable(run, Path(run), {})
    finished = FinishedRun.find(root, run, "run")
    return ExplorerTable(finished.name, finished.outputs.results, finished.summary)


@output_files.working_on_folders
def command(words: Sequence[str]) -> int:
    """`results show [<run>] [port=<number>] [open=auto|true|false] [output_dir=<folder>]`: serve a table until Ctrl-C.

    Raises ConfigError.
    """
    # a path to a table may hold an equals sign, which otherwise marks an option
    runs = [word for word in words if "=" not in word or word.endswith(".parquet")]
    options = pairs(
        [word for word in words if word not in runs], {"port": "0", "open": "auto", "output_dir": "outputs"}
    )
    _check(runs, options)
    began = time.monotonic()
    vega.begin()  # while the table is read
    table = find_table(Path(options["output_dir"]), runs[0] if runs else "")
    print(f"reading {table.path} (a million rows take some ten seconds)", file=sys.stderr, flush=True)
    site = ExplorerSite(table, Explorer(table.points()), secrets.token_urlsafe(16))
    if absence := vega.absence():
        raise OSError(absence)
    site.page  # noqa: B018 (refused here, where it can be told)
    return _serve(site, options, began)


def _check(runs: Sequence[str], options: Mapping[str, str]) -> None:
    problems = []
    if len(runs) > 1:
        problems.append(
            Problem("results show", "shows one run", " ".join(runs), "`python -m dse results compare` shows two")
        )
    if options["open"] not in ("auto", "true", "false"):
        problems.append(Problem("open", "must be auto, true or false", options["open"]))
    port = whole_number(options["port"])
    if port is None or port >= 1 << 16:
        problems.append(Problem("port", "must be a number below 65536", options["port"], "0 takes a free one"))
    if problems:
        raise ConfigError(problems)


def _serve(site: ExplorerSite, options: Mapping[str, str], began: float) -> int:
    try:
        server = Server(site, int(options["port"]))
    except OSError as error:
        rule = f"cannot be used: {error.strerror}"
        raise ConfigError([Problem("port", rule, options["port"], "leave it away: a free one is taken")]) from None
    count = len(site.explorer.points)
    print(f"{site.table.name}: {count:,} points with a result, ready after {time.monotonic() - began:.1f} s")
    print(f"{server.address}  (Ctrl-C stops it)", flush=True)
    # output that is piped belongs to a script, which opens no browser
    if options["open"] == "true" or (options["open"] == "auto" and sys.stdout.isatty()):
        webbrowser.open(server.address)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
    return 0
