"""Descriptions of machines: GPUs, nodes, fabrics, memory systems and processing in memory."""

from dse.plugins import Command

COMMANDS = {
    "systems": Command(
        "simulators.hardware.systems:systems",
        "systems [<name>]",
        "every machine: which backends it serves, and how each of its constants is known",
        examples=("systems", "systems h100_8"),
    ),
    "infragraph-import": Command(
        "simulators.hardware.infragraph:infragraph_import",
        "infragraph-import file=<YAML, JSON or XML> system=<shipped system> out=<file.yaml>",
        "a topology of InfraGraph or NCCL as a system: GPUs and links of a node, NICs and their place, number of nodes",
        {
            "file": "file of InfraGraph, YAML or JSON, or XML of NCCL_TOPO_DUMP_FILE",
            "system": "name of a shipped system, whose GPU and other constants stay",
            "out": "file of the system to write",
            "device": "device of the file that is a node, where several have GPUs",
            "fabric": "shipped fabric for what neither says of a network (infiniband_2)",
        },
        ("infragraph-import file=my_cluster.yaml system=h100_8 out=my_conf/system/my_cluster.yaml",),
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
    "technology": "Technologies: what silicon, memory and packages take",
}
