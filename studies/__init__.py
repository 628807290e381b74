"""Studies: one module per paper, with its claims in YAML beside it."""
