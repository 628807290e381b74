"""Memory traces of one's own through caches and DRAM: what each set, channel and bank of a machine saw."""

from dse.plugins import Command

RESEARCH = {"dse_memory_traces": "memory traces of one's own"}
"""Package -> what is studied there (`dse.plugins`)."""

COMMANDS = {
    "profile memory": Command(
        "dse_memory_traces.statistics:trace",
        "profile memory data=<file> [system=gem5_gcn3] [policy=combined] [out=<folder>]",
        "replay a memory trace of your own (Parquet, CSV, Accel-Sim) through caches and DRAM",
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
