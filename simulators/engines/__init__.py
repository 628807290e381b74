"""Engines, which run task graphs. Each module is a plug-in, independent of the others."""
