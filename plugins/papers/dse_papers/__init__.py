"""Studies of papers whose question is another than overlap; the models are those of the core.

`bert` says where the time of training goes (arXiv:2104.08335), `seqpoint` which iterations stand for an epoch
(arXiv:2007.10459), `jitq` what low-precision copies of weights cost (arXiv:2311.05034), and `goldyloc` how many GEMMs
should share a GPU (arXiv:2409.02227).
"""

from dse.plugins import Command

COMMANDS = {
    "profile seqpoint": Command(
        "dse_papers.seqpoint.epoch_log:seqpoint",
        "profile seqpoint data=<csv> [k0=5] [error=0.01] [out=<csv>]",
        "choose the iterations of a log that are worth profiling, by sequence length, and project the epoch",
        {
            "data": "CSV: sequence_length,seconds",
            "k0": "least number of groups (5)",
            "error": "allowed error of the projection (0.01)",
            "out": "CSV to write",
        },
        ("profile seqpoint data=my_epoch.csv",),
    ),
}
