"""The command `mcp`: the server by standard input and output, or by HTTP on this machine alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dse.errors import Problems, pairs
from dse.errors.parsing import whole_number

TOKEN = "DSE_MCP_TOKEN"
LOOPBACK = "127.0.0.1"
_LEAST_TOKEN = 24
_PORTS = range(1024, 65536)


def serve(words: Sequence[str]) -> int:
    """`mcp [root=<folder>] [transport=stdio|http] [port=]`: serve until it is interrupted. Raises ConfigError."""
    options = pairs(words, {"root": ".", "transport": "stdio", "port": "8765"})
    check, root, port = Problems(), Path(options["root"]), whole_number(options["port"])
    if find_spec("mcp") is None:
        check.add("mcp", "needs the package mcp", way_out="pip install 'overlap-dse-assistants[mcp]'")
    if not root.is_dir():
        check.add("root", "is no folder", value=options["root"], way_out="make it first")
    if options["transport"] not in ("stdio", "http"):
        check.add("transport", "is neither stdio nor http", value=options["transport"], way_out="write stdio or http")
    if port not in _PORTS:
        check.add("port", f"is no port from {_PORTS[0]} to {_PORTS[-1]}", value=options["port"], way_out="write 8765")
    token = os.environ.get(TOKEN, "")
    if options["transport"] == "http" and len(token) < _LEAST_TOKEN:
        rule = f"is needed for http, of {_LEAST_TOKEN} characters or more"
        check.add(TOKEN, rule, way_out=f"export {TOKEN}=$(openssl rand -hex 24), and give it to the assistant")
    check.done()
    from dse_mcp.server import guarded, server_of

    server = server_of(root.resolve())
    if options["transport"] == "stdio":
        server.run("stdio")
        return 0
    import uvicorn

    print(f"serving on http://{LOOPBACK}:{port}/mcp, for whoever has the token of {TOKEN}", file=sys.stderr)
    uvicorn.run(
        guarded(server.streamable_http_app(host=LOOPBACK), token), host=LOOPBACK, port=port, log_level="warning"
    )
    return 0
