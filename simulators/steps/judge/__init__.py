"""Bounds and shortcuts to hold a step against.

ideal: the least time that the hardware allows. projection: steps scaled from one profile (Comp-vs-Comm).
"""
