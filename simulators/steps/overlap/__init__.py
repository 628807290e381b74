"""Forms of overlap in a step, each with its equations.

sites: collectives of tensor and sequence parallelism with the GEMMs around them, by the schedules of `search_spaces`.
implementations: software that runs such a schedule. expert_exchanges: exchanges of experts beside other work, and
two_streams: the recurrence that prices it. token_splits: a prompt in two halves of its tokens (TokenWeave).
gradient_contention: reductions of gradients beside the backward pass.
"""
