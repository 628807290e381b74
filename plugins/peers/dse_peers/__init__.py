"""Simulators and descriptions of others: SimGrid and ASTRA-sim as engines, topologies of InfraGraph and NCCL."""

from dse.plugins import Command

RESEARCH = {"dse_peers": "engines and topologies of other simulators"}
"""Package -> what is studied there (`dse.plugins`)."""

COMMANDS = {
    "machine import": Command(
        "dse_peers.infragraph:infragraph_import",
        "machine import file=<YAML, JSON or XML> system=<shipped system> out=<file.yaml>",
        "read a topology of InfraGraph or NCCL as a system: GPUs and links of a node, NICs, number of nodes",
        {
            "file": "file of InfraGraph, YAML or JSON, or XML of NCCL_TOPO_DUMP_FILE",
            "system": "name of a shipped system, whose GPU and other constants stay",
            "out": "file of the system to write",
            "device": "device of the file that is a node, where several have GPUs",
            "fabric": "shipped fabric for what neither has of a network (infiniband_2)",
        },
        ("machine import file=my_cluster.yaml system=h100_8 out=my_conf/system/my_cluster.yaml",),
    ),
}
