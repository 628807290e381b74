"""Points evaluated by workers of Dask, on this machine or a cluster, with the same results as here."""

EVALUATORS = {"dask": "dse_cluster.evaluator:EVALUATOR"}
GUARDS = {"executor": "dse_cluster.settings:problems_of_files"}
