"""Finished runs: their folder, its files, and what is read off their table."""
