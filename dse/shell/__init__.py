"""First questions of a person at a terminal: help, completion, and whether the installation works."""

from dse.plugins import Command

COMMANDS = {
    "completion": Command(
        "dse.shell.completion:completion",
        "completion bash|zsh|fish",
        "a script for the shell's start-up file that completes commands, options, paths and values",
        {"line <text>": "what may stand at the end of a command line (for the script)"},
        ('completion bash  # eval "$(python -m dse completion bash)" in ~/.bashrc',),
    ),
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
