"""MLflow as a view of finished studies: one run per study run, one run per evaluated point.

The results are in the folders of the study runs; all that MLflow holds can be deleted and written again at any time:
`sync` writes what is missing and nothing else. Every failure is a `TrackingError` that the caller may print and ignore.

Layout: experiment `dse/<study>` holds the study runs (tens of them, for people to compare), experiment
`dse/<study>/points` holds all points flat. Nesting thousands of points under their study in one experiment floods
MLflow's list, which loads 100 runs at a time.
"""

from dse.plugins import Command

COMMANDS = {
    "store sync": Command(
        "dse.tracking.views:sync",
        "store sync [study=<name>] [uri=...]",
        "write into MLflow (or optuna=<storage>) what it lacks of the finished runs",
        {
            "study": "name of the study (all)",
            "uri": "of MLflow, instead of the study's",
            "optuna": "storage or journal of Optuna",
            "points": "auto, all or none",
            "repair": "true moves a damaged SQLite file aside and builds it again",
            "config_dir": "folder of your own configurations",
            "output_dir": "folder of results (outputs)",
        },
        ("store sync", "store sync study=ficco_sweep optuna=trials.log"),
    ),
    "ui": Command(
        "dse.tracking.server:ui",
        "ui [port=5000]",
        "serve the MLflow UI on 127.0.0.1",
        {
            "port": "of this machine (5000)",
            "uri": "of MLflow's database (sqlite:///mlflow.db)",
            "open": "auto, true or false: the newest view in a browser",
        },
        ("ui port=5001",),
    ),
}
CHECKS = {"mlflow": "dse.tracking.doctor:check_database", "ui": "dse.tracking.doctor:check_port"}
GROUPS = {"tracking": "Tracking"}
