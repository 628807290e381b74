"""Search spaces: schedules, each of which declares its knobs and lowers to a task graph."""

GROUPS = {"schedule": "Schedules"}
