"""Search methods held against spaces whose every point is known: a backend whose designs are searches, and a study."""

RESEARCH = {"dse_search_benchmark": "search methods on known fronts"}
"""Package -> what is studied there (`dse.plugins`)."""

BACKENDS = {"landscape": "dse_search_benchmark.backend:LandscapeBackend"}
