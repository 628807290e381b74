"""Collectives alone: explicit schedules, their proof, algorithms of libraries, synthesis, bounds and files."""

from dse.plugins import Command

FORMATS = {"msccl": "dse_collectives.schedule_files:MSCCL"}
COMMANDS = {
    "machine collective": Command(
        "dse_collectives.command:collective",
        "machine collective pattern=<name> | schedule=<file> [system=mi300x_8] [bytes=64MiB] [out=<folder>]",
        "compare schedules of a collective, synthesised and of libraries, with a bound that none can beat",
        {
            "pattern": "all_gather, reduce_scatter, all_reduce or all_to_all",
            "schedule": "in place of it: a schedule in YAML or XML of MSCCL, which is proven and timed with the others",
            "system": "machine whose links count (mi300x_8)",
            "bytes": "of a GPU's larger buffer (64MiB)",
            "relay_bytes": "room of a GPU for what it only passes on; default: as much as needed",
            "out": "folder to write to",
            "system.<path>": "a value of the machine, such as system.fabric.num_nodes=2",
        },
        (
            "machine collective pattern=all_gather bytes=256MiB",
            "machine collective pattern=all_to_all system=mi210_16x4 system.fabric.num_nodes=2",
            "machine collective schedule=outputs/collective/all_gather_mi300x_8/schedule.xml",
        ),
    ),
}
