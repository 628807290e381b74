"""Engines: what runs a task graph. Each module is a plug-in, and knows no other."""
