"""Co-design: machines with a price, and for each the best plan of every workload.

A design is a machine by what differs from a base (`machine`): its area, power and cost are those of
`dse_codesign.technology`, its steps those of `simulators.steps`, with the best schedule at every site, found for
each machine (`plans`). Workloads are weighted models in a mode of run.
"""

from pathlib import Path

from dse.plugins import Command

DATA = Path(__file__).with_name("conf") / "data"
"""Tables that ship with this plug-in."""

GROUPS = {"technology": "Technologies: what silicon, memory and packages take"}

WORDS = {
    "throughput_x": "throughput over the base's",
    "worst_x": "throughput of the slowest workload",
    "value_x": "throughput per dollar",
    "area_mm2": "area of all dies",
    "die_mm2": "area of a compute die",
    "power_w": "power of a module",
    "module_usd": "cost of a module",
    "cost_usd": "cost of a GPU with its share",
}
"""Metric -> words for it."""

BACKENDS = {"codesign": "dse_codesign.backend:CodesignBackend"}
COMMANDS = {
    "codesign": Command(
        "dse_codesign.command:codesign",
        "codesign [budget.area_mm2=... budget.power_w=... budget.cost=...] [...]",
        "which machine is best for weighted workloads within a budget, and what each feature of it is worth",
        {
            "budget.area_mm2": "most area of all dies of a package [mm2]",
            "budget.power_w": "most power of a module [W]",
            "budget.cost": "most cost of a GPU with its share of node, network and energy [USD]",
        },
        ("codesign budget.area_mm2=900 budget.power_w=700", "codesign budget.cost=12000 workloads.decode.weight=3"),
        study="codesign",
    ),
}
