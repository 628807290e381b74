"""Descriptions of machines: GPUs, nodes, fabrics, memory systems and processing in memory."""

GROUPS = {
    "system": "Systems",
    "setting": "Settings of a GPU",
    "pim": "Units in a system's memory",
    "instructions": "Instruction sets of units in memory",
    "format": "Formats of copies",
}
