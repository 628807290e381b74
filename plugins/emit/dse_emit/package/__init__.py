"""Overlapped operators in plain PyTorch, as the schedule at the top of each file runs them."""
