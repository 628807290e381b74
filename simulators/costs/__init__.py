"""Costs of operators and transfers, isolated and under contention."""
