"""Profiles of real runs: what a GPU executed when, what each kernel waited for, and the same run replayed."""

from pathlib import Path

from dse.plugins import Command

DATA = Path(__file__).with_name("conf") / "data"
"""Tables and profiles that ship with this plug-in."""

BACKENDS = {"profile": "dse_traces.backend:ProfileBackend"}
WORDS = {
    "gain_s": "gain",
    "gain_low_s": "gain, at least",
    "gain_high_s": "gain, at most",
    "exposed_s": "exposed communication",
    "hidden": "hidden communication",
    "comm_sm_s": "SM time of communication",
    "comm_sms": "SMs that collectives hold",
    "plan.order": "order of collectives",
    "plan.sms": "SMs of a collective",
    "plan.mover": "mover",
    "plan.link": "rate of links",
    "plan.gpu": "GPU",
    "plan.fused": "fusing with neighbours",
    "plan.micro_batches": "micro-batches",
}
"""Column -> words for it on an axis, where its name does not say it."""

PHRASES = {
    "plan.order": {
        "as_recorded": "",
        **{"earlier": "collectives earlier", "waited_for_later": "collectives waited for later"},
        **{f"in_{parts}_parts": f"collectives in {parts} parts" for parts in (2, 4, 8)},
        **{f"{count}_merged": f"{count} collectives merged" for count in (2, 4)},
    },
    "plan.sms": {"0": "", **{str(count): f"{count} SMs for a collective" for count in range(1, 4097)}},
    "plan.mover": {"sms": "", "copy_engines": "by copy engines", "switch": "by the switch"},
    "plan.fused": {"True": "kernels fused with neighbours", "False": ""},
    "plan.micro_batches": {"1": "", "2": "two micro-batches"},
    "plan.gpu": "kernels on {}",
    **{f"plan.groups.c{place}.sms": f"c{place} on {{}} SMs" for place in range(1, 22)},
    **{f"plan.groups.c{place}.{knob}": f"c{place} {{}}" for place in range(1, 22) for knob in ("order", "mover")},
    "plan.link": {"1.0": "", **{f"{factor:.1f}": f"links {factor:g} times as fast" for factor in (1.5, 2.0, 4.0)}},
}
"""How values of knobs read in an answer, where their names do not say it (`dse.results.words`)."""

_KERNELS = "a YAML file that names kernels: a class, and patterns of the names of its kernels"
COMMANDS = {
    "profile import": Command(
        "dse_traces.commands.import_profile:trace_import",
        "profile import profile=<file> [kernels=<file>] [system=<machine>] [out=<folder>]",
        "read a profile (PyTorch, Nsight Systems, rocprof, Chakra): what is exposed, what waits, and a replay",
        {
            "profile": "a file; several, the ranks of one run: a folder, a pattern or a list with commas",
            "kernels": _KERNELS,
            "system": "the machine that ran it, whose file is written with intervals by its own GEMMs",
            "out": "folder to write to",
        },
        ("profile import profile=run.json.gz",),
    ),
    "profile explain": Command(
        "dse_traces.commands.explain:explain",
        "profile explain <A> <B> [kernels=<file>] [out=<folder>]",
        "explain the difference between two profiles or points (<study>:<key>), cause by cause",
        {
            "kernels": _KERNELS,
            "out": "folder to write to (outputs/explain)",
            "output_dir": "folder of results (outputs)",
            "system": "machine whose laws of contention count if a profile shows none; default: by its GPU's name",
        },
        ("profile explain before.json.gz after.json.gz", "profile explain ficco_sweep:1a2b3c ficco_sweep:4d5e6f"),
    ),
    "profile export": Command(
        "dse_traces.commands.export:chakra_export",
        "profile export study=<name> key=... | profile=<file>",
        "write execution traces (Chakra) of a stored point or a profile, for ASTRA-sim and others [ranks=8]",
        {
            "study": "name of the study",
            "key": "of the point in results.parquet, or its start",
            "profile": "in place of both: a file that profile import reads",
            "kernels": _KERNELS,
            "ranks": "how many (the node's; 1 of a profile)",
            "out": "folder to write to",
            "config_dir": "folder of your own configurations",
            "output_dir": "folder of results (outputs)",
        },
        ("profile export study=ficco_sweep key=1a2b3c", "profile export profile=run.json.gz ranks=8"),
    ),
    "profile advise": Command(
        "dse_traces.commands.advise:advise_profile",
        "profile advise profile=<file> [system=<machine>] [kernels=<file>] [out=<folder>]",
        "find the changes of collectives that would shorten a profiled run, each alone and all together",
        {
            "profile": "a file that profile import reads",
            "kernels": _KERNELS,
            "system": "machine whose constants are assumed if the profile has none; default: by its GPU's name",
            "out": "folder to write to",
        },
        ("profile advise profile=run.json.gz", "profile advise profile=kernels.csv system=mi300x_8"),
    ),
    "profile twin": Command(
        "dse_traces.commands.twin:profile_twin",
        "profile twin profile=<file> system=<machine> [stack=<stack>] [model=<model>] [kernels=<file>] [out=<folder>]",
        "fit a shipped machine, and the host of a stack, to a profile of a step: constants for any plan",
        {
            "profile": "a file; several, the ranks of one run: a folder, a pattern or a list with commas",
            "system": "the nearest shipped machine, whose constants are the priors",
            "stack": "the nearest stack, which is written with the host's time of a launch",
            "model": "the model of the printed command",
            "kernels": _KERNELS,
            "out": "folder to write to, for --config-dir (twin)",
        },
        (
            "profile twin profile=run.json.gz system=h100_8",
            "profile twin profile='rank*.json.gz' system=h100_8 out=twin",
        ),
    ),
}
