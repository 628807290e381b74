"""Long test campaigns: kills, faults, broken input, clusters, wrong answers. `python -m tests.campaigns.<name>`."""
