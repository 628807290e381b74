"""Changes of a recorded run, and what they would gain.

settings: SMs, mover, software and links of collectives. dependencies: what waits for what. fusion: kernels joined to
the one before. micro_batches: the batch in two halves. other_gpu: kernels on another GPU. what_if: a plan of such
changes, run again. plan_results: its time and gain. advice: the changes that pay. software: whether other software of
collectives would.
"""
