"""Evaluation of designs by a backend, in this process or in worker processes."""
