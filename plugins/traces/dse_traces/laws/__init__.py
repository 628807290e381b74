"""Laws of a recorded run: how kernels slow one another down, learnt from the profile or assumed of a machine.

contention: kernels beside a collective. rate_law: a collective's time over payload and SMs. machine: rates of a
machine. kernel_groups: groups of collectives and classes of kernels that slow down alike. task_graph: the profile as a
graph with these laws. own_residuals: intervals of a machine's own GEMMs. assumed_changes: effects of changes where
nothing was measured.

The way of a kernel from the profile to the time of a run: `profile.waits` infers what it waited for, and
`contention.learn_laws` how much collectives slow it; `task_graph.contention_model` puts it into a class, takes off its
recorded time what those laws explain, and keeps the rest as its time alone. `ContentionModel.lower` makes it a task, or
several where others wait for a part of it, after its stream, its launch and what it waited for, and gives the graph a
law for each class and group. The engine runs the graph, in which it is slowed again by the collectives that are active
then, and the last end is the makespan. A change is another structure, or other scenarios on it.

`profile.replay.lower_kernels` makes a graph of the same waits without any law: a task there takes as long as recorded,
contention included; each launch comes at its recorded time instead of after the kernels that the host waited for, and
a wait for an unknown reason is left out instead of kept. So a replay says how much of a run is understood, and the
graph of the laws what another run would take.
"""
