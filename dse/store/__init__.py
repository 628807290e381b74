"""Recorded results: one database for all studies, shared by processes and machines."""

from dse.plugins import Command

COMMANDS = {
    "check": Command(
        "dse.store.check:check",
        "check",
        "look at every recorded result: is it as it was written?",
        {"output_dir": "folder of results (outputs)", "url": "of the database (auto)"},
        ("check", "check output_dir=outputs"),
    ),
}
CHECKS = {"results": "dse.store.doctor:check_results"}
GROUPS = {"store": "Stores"}
