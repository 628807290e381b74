"""The server: a tool for each question, which reports progress, and refuses with path, rule and way out."""

from __future__ import annotations

import asyncio
import hmac
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from pydantic import Field
from pydantic.fields import FieldInfo

import dse
from dse.errors import ConfigError
from dse_mcp.questions import TOOLS, Question, command_text
from dse_mcp.runs import Answer, ask

_AT_ONCE = 2
_INSTRUCTIONS = """\
Which overlap of computation and communication wins on a GPU system, by how much, and how surely. Ask `options` for
names of machines and models first. Quote the interval with each number, and what is measured, calibrated or assumed.
`command` gives the same answer on a command line, and `page` is its report. A long run that was cancelled goes on where
it was when the same question is asked again.
"""


def server_of(root: Path) -> MCPServer:
    """A server whose runs are written below a folder, and whose files are read from there."""
    server = MCPServer("dse", instructions=_INSTRUCTIONS, version=dse.__version__)
    limit = asyncio.Semaphore(_AT_ONCE)
    for name, question in TOOLS.items():
        server.add_tool(_tool(question, root, limit), name=name, description=_description(question))
    return server


def _description(question: type[Question]) -> str:
    """The question's docstring, and the command that it stands for."""
    return f"{(question.__doc__ or '').strip()}\n\nAs `{command_text(question.VERB)} ...` answers it."


def _tool(question: type[Question], root: Path, limit: asyncio.Semaphore) -> Callable[..., Awaitable[Answer]]:
    """A function with the fields of a question as its arguments, of which the schema of a tool is made."""

    async def tool(ctx: Context, **fields: Any) -> Answer:
        async def report(done: float, total: float | None, text: str) -> None:
            await ctx.report_progress(done, total, text)

        try:
            words = question.model_validate(fields).words(root)
        except ConfigError as error:
            return _refusal(question, str(error))
        async with limit:
            return await ask(words, root, report)

    arguments = [_argument(name, of) for name, of in question.model_fields.items()]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Context)
    tool.__signature__ = inspect.Signature([context, *arguments], return_annotation=Answer)  # type: ignore[attr-defined]
    tool.__annotations__ = {argument.name: argument.annotation for argument in (context, *arguments)} | {
        "return": Answer
    }
    return tool


def _argument(name: str, field: FieldInfo) -> inspect.Parameter:
    """A field of a question as an argument of a function."""
    default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
    bounds = Field(description=field.description)
    kind: Any = Annotated[field.annotation, bounds, *field.metadata]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _refusal(question: type[Question], text: str) -> Answer:
    """A refusal before anything ran, with the exit code that the command line has for it."""
    command = command_text(question.VERB)
    return Answer(answer=[], text="", command=command, run=None, page=None, exit_code=2, refused=text)


def guarded(app: Any, token: str) -> Any:
    """An application that answers only requests with a token."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = {key.lower(): value for key, value in scope["headers"]}
            shown = headers.get(b"authorization", b"")
            if not hmac.compare_digest(shown, f"Bearer {token}".encode()):
                challenge = [(b"www-authenticate", b"Bearer")]
                await send({"type": "http.response.start", "status": 401, "headers": challenge})
                await send({"type": "http.response.body", "body": b"a bearer token is needed: see DSE_MCP_TOKEN\n"})
                return
        await app(scope, receive, send)

    return answer
