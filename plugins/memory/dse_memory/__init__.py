"""The memory system of one GPU, driven by traces of addresses, and the studies of two papers on it.

`cache_policies` judges the claims of arXiv:1910.00134, `convolution_patterns` those of arXiv:1811.08933.
"""

RESEARCH = {"dse_memory": "caches and DRAM, line by line"}
"""Package -> what is studied there (`dse.plugins`)."""

BACKENDS = {"memory": "dse_memory.backend:MemoryBackend"}
GROUPS = {"application": "Applications as memory traces", "policy": "Cache policies"}
