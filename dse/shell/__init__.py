"""First questions of a person at a terminal: help, and whether the installation works."""

from dse.plugins import Command

COMMANDS = {
    "doctor": Command(
        "dse.shell.doctor:doctor",
        "doctor [-v]",
        "check the installation: Python, packages, caches, databases, disk, ports, plug-ins, your own configuration",
        {
            "-v": "versions and places, too",
            "output_dir": "folder of results (outputs)",
            "uri": "MLflow's database (sqlite:///mlflow.db)",
            "port": "of the MLflow UI (5000)",
            "config_dir": "folder of your own configurations",
        },
        ("doctor", "doctor -v config_dir=my_conf"),
    ),
}
