"""Synthesis: schedules that a search finds, or that are written out step by step, and how far from the bound they are.

`schedule` is the family, `search` finds its steps, `study` holds what was found against every preset.
"""

from pathlib import Path

RESEARCH = {"dse_synthesis": "schedules that a search writes"}
"""Package -> what is studied there (`dse.plugins`)."""

CONF = Path(__file__).with_name("conf")
"""Options that this plug-in brings."""

LOOKS = {"synthesised": ("synthesised", "vermillion", "*")}
"""Label, colour and marker of the schedule in figures (`dse.plots.labels`)."""
