"""Points evaluated by workers of Dask, on this machine or a cluster, with the same results as here."""

from dse.plugins import Command

EVALUATORS = {"dask": "dse_cluster.evaluator:EVALUATOR"}
GUARDS = {"executor": "dse_cluster.settings:problems_of_files"}
COMMANDS = {
    "store certificates": Command(
        "dse_cluster.certificates:certificates",
        "store certificates [out=certificates]",
        "make the certificates with which a scheduler, its workers and clients know each other (TLS)",
        {"out": "folder, new (certificates)", "days": "for which they are valid (365)"},
        ("store certificates", "store certificates out=certificates days=30"),
    ),
}
