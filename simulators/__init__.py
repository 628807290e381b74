"""The machine: systems, workloads, operator and transfer costs, task graphs, engines, metrics, the overlap backend."""
