"""Search methods held against spaces whose every point is known: a backend whose designs are searches, and a study."""

BACKENDS = {"landscape": "dse_search_benchmark.backend:LandscapeBackend"}
