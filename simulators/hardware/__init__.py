"""Descriptions of machines: GPUs, nodes, fabrics, memory systems and processing in memory."""

from dse.plugins import Command

COMMANDS = {
    "systems": Command(
        "simulators.hardware.systems:systems",
        "systems [<name>]",
        "every machine: which backends it serves, and how each of its constants is known",
        examples=("systems", "systems h100_8"),
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
