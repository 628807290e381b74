"""Descriptions of computations: operators, models and sequence lengths."""

GROUPS = {"workload": "Workloads", "model": "Models", "lengths": "Sequence lengths of an epoch"}
CATALOGUES = {"model": "simulators.workloads.catalogue:CATALOGUE"}
