"""Instances of jobs on servers that nothing shares: their least makespan, proven, and bounds by subsets of jobs."""

RESEARCH = {"dse_optimal": "proven optima of small instances"}
"""Package -> what is studied there (`dse.plugins`)."""
