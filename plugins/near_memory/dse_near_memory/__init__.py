"""T3 request by request: the address map, the tracker, DMA commands, and arbitration at channels and banks of an HBM.

The fluid model of the same schedules is `search_spaces.triggered`; `study=t3_requests` puts both side by side.
"""

RESEARCH = {"dse_near_memory": "T3's memory controllers, request by request"}
"""Package -> what is studied there (`dse.plugins`)."""

BACKENDS = {"near_memory": "dse_near_memory.backend:RequestBackend"}
GROUPS = {"controller": "Memory controllers below a tracker"}
WORDS = {
    "row_hits": "row hits",
    "bus_turns": "turns of the bus",
    "tracker_spills": "evictions of the tracker",
    "tracker_entries": "entries of the tracker in use",
    "bus_busy": "use of the memory bus",
}
"""Metric -> words for it."""
