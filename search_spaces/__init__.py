"""Search spaces: schedules, each of which declares its knobs and lowers to a task graph."""

GROUPS = {"schedule": "Schedules"}

WORDS = {
    "schedule.comm_engine": {"dma": "by DMA", "cu": "by CUs"},
    "schedule.comm_cus": "on {} CUs",
    "schedule.num_chunks": "{} chunks",
    "schedule.num_streams": "{} at once",
    "schedule.priority": {
        "equal": "",
        "communication": "communication first",
        "compute": "compute first",
    },
}
"""How values of knobs read in an answer, where their names do not say it (`dse.results.words`)."""
