"""Tables of one GPU, measured by itself: torch, and nothing of this project. `python -m dse_judge --out DIR`."""
