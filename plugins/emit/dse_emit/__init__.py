"""Overlap schedules written as operators in plain PyTorch, which run without dse."""

from dse.plugins import Command

COMMANDS = {
    "emit": Command(
        "dse_emit.command:emit",
        'emit study=<name> key=<first letters> | plan=<plan.yaml> gpus=8 | schedule="<option> <knob>=<value>" gpus=8',
        "write the chosen schedule as a package of plain PyTorch, with a check against serial execution",
        {
            "study": "a study whose newest run has the point",
            "key": "first letters of the point's key, as results.parquet has it",
            "plan": "plan.yaml of a run of `plan`: a package for each site that has a schedule",
            "schedule": "an option of the group schedule, with values of its knobs",
            "pattern": "all_gather, all_to_all, reduce_scatter or all_reduce (all_gather), with schedule=",
            "order": "of an all-to-all: before or after the GEMM (before)",
            "gpus": "ranks of the group, with plan= and schedule=",
            "m, n, k": "rows of all ranks, columns and depth of the GEMM of a rank, for the check (256, 128, 64)",
            "out": "folder to write (my_overlap)",
            "output_dir": "folder of the runs (outputs)",
        },
        (
            "emit study=ficco_sweep key=3f2a out=my_overlap",
            'emit schedule="hetero_fused_1d num_chunks=4" gpus=8 out=my_overlap',
        ),
    )
}
