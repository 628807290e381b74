"""Descriptions of machines: GPUs, nodes, fabrics, memory systems and processing in memory."""

from dse.plugins import Command

COMMANDS = {
    "machine list": Command(
        "simulators.hardware.machine_commands:list_machines",
        "machine list",
        "list every machine: which backends it serves, and how each of its constants is known",
    ),
    "machine show": Command(
        "simulators.hardware.machine_commands:show_machine",
        "machine show <name>",
        "show every constant of a machine with its source, and what a backend misses",
        examples=("machine show h100_8", "machine show my_gpu --config-dir my_conf"),
    ),
}
GROUPS = {
    "system": "Systems: a GPU, a node and a fabric",
    "gpu": "GPUs",
    "node": "Nodes of GPUs",
    "fabric": "Networks between nodes",
    "pim": "Units in a system's memory",
    "instructions": "Instruction sets of units in memory",
    "format": "Formats of copies",
}
VARIANTS = {"gpu": ("name", "description", "note", "fitted_on", "measured_as")}
