"""Overlap of a GEMM and a collective (or of independent GEMMs): schedules lowered to task graphs."""

BACKENDS = {
    "overlap": "simulators.overlap.backend:OverlapBackend",
    "powered": "simulators.overlap.powered:PoweredBackend",
}
