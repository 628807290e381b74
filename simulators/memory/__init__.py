"""The memory system of one GPU, driven by traces of addresses."""

from dse.plugins import Command

BACKENDS = {"memory": "simulators.memory.backend:MemoryBackend"}
COMMANDS = {
    "profile memory": Command(
        "simulators.memory.statistics:trace",
        "profile memory data=<file> [system=gem5_gcn3] [policy=combined] [out=<folder>]",
        "a memory trace of your own (Parquet, CSV, Accel-Sim) through caches and DRAM",
        {
            "data": "file of the trace",
            "system": "with caches and DRAM (gem5_gcn3)",
            "policy": "of the caches (combined)",
            "out": "folder to write to",
            "rows": "requests that are read, at most",
        },
        ("profile memory data=my_trace.parquet policy=combined",),
    ),
}
GROUPS = {"application": "Applications as memory traces", "policy": "Cache policies"}
