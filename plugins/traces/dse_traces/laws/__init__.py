"""Laws of a recorded run: how kernels slow one another down, learnt from the profile or assumed of a machine.

contention: kernels beside a collective. rate_law: a collective's time over payload and SMs. machine: rates of a
machine. task_graph: the profile as a graph with these laws. own_residuals: intervals of a machine's own
GEMMs. assumed_changes: effects of changes where nothing was measured.
"""
