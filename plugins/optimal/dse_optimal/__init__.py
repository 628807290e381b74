"""Instances of jobs on servers that nothing shares: their least makespan, proven, and bounds by subsets of jobs."""
