"""Studies of papers whose question is another than overlap; the models are those of the core.

`bert` says where the time of training goes (arXiv:2104.08335), `seqpoint` which iterations stand for an epoch
(arXiv:2007.10459), `jitq` what low-precision copies of weights cost (arXiv:2311.05034), and `goldyloc` how many GEMMs
should share a GPU (arXiv:2409.02227).
"""
