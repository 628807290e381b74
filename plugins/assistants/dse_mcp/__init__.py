"""Questions of dse as tools of the Model Context Protocol: an assistant asks what the command line answers."""

from dse.plugins import Command

COMMANDS = {
    "mcp": Command(
        "dse_mcp.command:serve",
        "mcp [root=<folder>] [transport=stdio|http] [port=8765]",
        "answer an assistant's questions as a server of the Model Context Protocol",
        {
            "root": "folder that runs are written to, and files are read from (.)",
            "transport": "stdio, which assistants start by themselves, or http, on this machine alone",
            "port": "of http (8765); its token is read from the variable DSE_MCP_TOKEN",
        },
        ("mcp root=my_runs", "mcp transport=http port=8765"),
    )
}
