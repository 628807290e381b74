"""Recorded results: one database for all studies, shared by processes and machines."""

from dse.plugins import Command

COMMANDS = {
    "check": Command("dse.store.check:check", "check", "look at every recorded result: is it as it was written?"),
}
GROUPS = {"store": "Stores"}
