"""Speed against peers, side by side in one run, and the commands of a reach, one each: `python -m benchmarks.<name>`.

Ratios count; absolute times belong to one machine and moment.
"""
