"""Analyses of finished runs: comparisons, importance of knobs, decision rules, robustness."""
