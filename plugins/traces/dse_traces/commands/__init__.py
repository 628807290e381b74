"""Commands of `profile`: import (of one rank and of several), advise, explain, export.

lines: what several of them print.
"""
