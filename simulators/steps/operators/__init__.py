"""Operators of a step: what each does, and what that costs on a GPU and over its links.

work: kinds of operators (products, streams, exchanges) and their costs; everything below is made of them.
sizes: numbers of a transformer's layers on one GPU. stored_formats: bytes of weights and caches in their own formats.
latent_attention, experts, state_layers: layers of transformers. recurrent: models of before transformers.
quantised_weights: low-precision copies of weights. context_parallel: a sequence split over GPUs, around a ring or by
heads. fused_sums: partial sums and the norm after them in one kernel.
"""
