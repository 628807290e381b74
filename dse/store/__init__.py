"""Recorded results: one database for all studies, shared by processes and machines.

contract: what evaluation asks of a store, and its URL. session: a running study on the store, with its leases.
result_store: looking up and recording results; result_rows: their bytes and checksums. database, postgres: connections.
owner: which processes live. fronts: Pareto fronts in the database. check, doctor, status: its commands.
"""

from dse.plugins import Command

COMMANDS = {
    "store check": Command(
        "dse.store.check:check",
        "store check",
        "check that every recorded result is as it was written",
        {"output_dir": "folder of results (outputs)", "url": "of the database (auto)"},
        ("store check", "store check output_dir=outputs"),
    ),
    "store status": Command(
        "dse.store.status:status",
        "store status [store=<URL>] [every=2 s]",
        "show the studies of a store: results, workers, rates and failures",
        {
            "store": "database of the studies (auto: results.db of output_dir)",
            "output_dir": "folder of results (outputs)",
            "every": "time between two looks; without it, one look",
        },
        ("store status", "store status store=postgresql://me@host/database every=2s"),
    ),
}
CHECKS = {"results": "dse.store.doctor:check_results"}
GROUPS = {"store": "Stores"}
