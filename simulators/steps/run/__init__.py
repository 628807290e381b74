"""One step, from the operators of a model to its time and its memory.

transformer: blocks of operators with their collectives; blocks: of a model of any kind. layer_passes: forward,
recomputed and backward passes of a layer. passes: those of a micro-batch on the busiest stage. host_launches: what a
host launches. offload: activations in the host's memory. iteration: the whole step in closed form. build: a step from
its design. task_graph: the same step for the engines. measures: its metrics.
"""
