"""Tables of one GPU, measured by itself: torch, and nothing of this project. `python -m benchmarks.gpu --out DIR`."""
