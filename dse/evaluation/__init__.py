"""Evaluation of designs by a backend, in this process, in worker processes, or by a cluster."""

from dse.plugins import Command

GUARDS = {"executor": "dse.evaluation.settings:problems_of_files"}
COMMANDS = {
    "certificates": Command(
        "dse.evaluation.certificates:certificates",
        "certificates [out=certificates]",
        "make the certificates with which a scheduler, its workers and clients know each other (TLS)",
        {"out": "folder, new (certificates)", "days": "for which they are valid (365)"},
        ("certificates", "certificates out=certificates days=30"),
    ),
}
