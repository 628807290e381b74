"""Price of a machine: area, power and cost by the same rules for every GPU, with intervals.

    technology = load_technology("silicon_2026")
    machine = of_system(system, technology)
    price(machine, technology.nominal).cost_usd
    price(machine, technology.sample(256, seed=0)).total_usd  # [256, B]

Rules are in `area`, `power` and `cost`; coefficients in `conf/technology`, each with an interval and a source.
"""

from dse_codesign.technology.knobs import MachineActivity, MachineKnobs, design_activity, stack_machines
from dse_codesign.technology.known import known_gpus, of_system
from dse_codesign.technology.power import design_power_w, module_power, sustained_clock
from dse_codesign.technology.price import Price, price
from dse_codesign.technology.settings import Coefficients, Technology, load_technology, technology_of

__all__ = [
    "Coefficients",
    "MachineActivity",
    "MachineKnobs",
    "Price",
    "Technology",
    "design_activity",
    "design_power_w",
    "known_gpus",
    "load_technology",
    "module_power",
    "of_system",
    "price",
    "stack_machines",
    "sustained_clock",
    "technology_of",
]
