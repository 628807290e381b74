"""The memory system of one GPU, driven by traces of addresses."""

from dse.plugins import Command

BACKENDS = {"memory": "simulators.memory.backend:MemoryBackend"}
COMMANDS = {
    "trace": Command(
        "simulators.memory.statistics:trace",
        "trace data=<file> [system=gem5_gcn3] [policy=combined] [out=<folder>]",
        "a memory trace of your own (Parquet, CSV, Accel-Sim) through caches and DRAM",
    ),
}
GROUPS = {"application": "Applications as memory traces", "policy": "Cache policies"}
