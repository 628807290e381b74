"""Costs of operators and transfers, isolated and under contention.

gemm: products of matrices, each by one of its models. memory_bound, streaming: operators that the HBM bounds.
convolution, recurrent, pim_bursts: others. transfer: what CUs, copy engines and switches move between GPUs, one
transfer at a time. collective: a whole collective of a step, by the links or as a library was measured; algorithms:
what each GPU sends in it, and in how many steps; fabric: between nodes; expert_exchange: tokens to and from experts.
sharing: how much longer kernels take beside moved data. chip: what one kernel can draw of a GPU. power: watts, energy.
"""
