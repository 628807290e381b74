"""Workgroups: persistent kernels that communicate by themselves, and GEMMs that arrive on one GPU.

`persistent` runs logical workgroups of a fused kernel, `fused_kernels` makes them of an operator and its collective,
`fused_iteration` puts kernels and collectives of a workload together, and `fused_study` judges the claims of
arXiv:2305.06942 in two declared configurations. `slots` dispatches workgroups of GEMMs to CUs, `arrivals` draws GEMMs
with their dependencies, `concurrency` decides at run time which run, by which kernels, and `arrival_study` compares.
"""

from pathlib import Path

RESEARCH = {"dse_workgroups": "persistent kernels and queues of GEMMs, workgroup by workgroup"}
"""Package -> what is studied there (`dse.plugins`)."""

CONF = Path(__file__).with_name("conf")
"""Options that this plug-in brings."""

GROUPS = {"arrivals": "GEMMs that arrive", "logic": "Run-time logics"}
BACKENDS = {
    "workgroups": "dse_workgroups.fused_backend:FusedBackend",
    "arrivals": "dse_workgroups.arrival_backend:ArrivalBackend",
}
