"""The memory system of one GPU, driven by traces of addresses."""

BACKENDS = {"memory": "simulators.memory.backend:MemoryBackend"}
GROUPS = {"application": "Applications as memory traces", "policy": "Cache policies"}
