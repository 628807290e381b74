"""Studies: a package for each paper or question, with its claims in YAML inside; a module where one file is all."""

from dse.plugins import Command

COMMANDS = {
    "plan": Command(
        "studies.plan:command",
        "plan model=<name> system=<name> [parallel.tp=8|parallel=auto] [run.mode=decode ...] [plan=<plan.yaml>]",
        "how a model's step should be spread over a machine, which schedule its collectives should have, what it gains",
        {
            "parallel": "auto: degrees, split states, micro-batches and recomputation are chosen, but for those given",
            "layouts.gpus": "number of GPUs for parallel=auto; those of the system by itself",
            "plan": "plan.yaml of a run, or of settings-import: judged as it is, and not searched",
            "...": "overrides of study=plan",
        },
        (
            "plan model=llama3_70b system=h100_8 parallel.tp=8",
            "plan model=llama3_70b system=h100_96gb_8 run.mode=training run.batch=64 parallel=auto layouts.gpus=32",
        ),
    ),
}

_CATEGORIES = {
    "best preset": ("grey", "8"),
    "bulk": ("grey", "p"),
    "fused": ("vermillion", "8"),
    "fused, producers (v1)": ("amber", "v"),
    "fused, producers and consumers (v2)": ("vermillion", "p"),
    "hipBLASLt (static tiles)": ("blue", "8"),
    "work stealing (dynamic tiles)": ("vermillion", "h"),
    "GEMM beside the collective": ("blue", "p"),
    "collective beside the GEMM": ("amber", "*"),
    "until both have ended": ("green", "*"),
    "kernels tuned alone": ("blue", "^"),
    "kernels tuned for sharing": ("vermillion", "D"),
    "best kernels": ("green", "s"),
    "GEMM reads": ("navy", "s"),
    "GEMM writes": ("sky", "o"),
    "RS reads": ("wine", "s"),
    "RS writes": ("violet", "s"),
    "AG reads": ("green", "p"),
    "AG writes": ("lime", "s"),
    "linear GEMMs": ("navy", "o"),
    "FC GEMMs": ("blue", "*"),
    "attention GEMMs": ("sky", "8"),
    "softmax": ("green", "h"),
    "GeLU": ("lime", "h"),
    "dropout, residual, LayerNorm": ("amber", "h"),
    "embedding": ("grey", "h"),
    "output": ("wine", "o"),
    "optimizer": ("vermillion", "*"),
    "SeqPoint": ("vermillion", "^"),
    "most frequent": ("blue", "h"),
    "median length": ("sky", "p"),
    "worst length": ("wine", "D"),
    "fifty in a row": ("amber", "^"),
    "roofline": ("grey", "X"),
    "fitted": ("vermillion", "X"),
    "nearest": ("blue", "X"),
    "ours": ("vermillion", "o"),
    "nearest row": ("blue", "o"),
    "ASTRA-sim": ("amber", "s"),
    "SimGrid": ("green", "o"),
    "G-long": ("navy", "p"),
    "GC-equal": ("sky", "D"),
    "C-long": ("wine", "^"),
}
LOOKS = {label: (label, *look) for label, look in _CATEGORIES.items()}
"""Category of a study, in words -> its label, colour and marker in figures (`dse.plots.palette`)."""
