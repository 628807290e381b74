"""What may be chosen: schedules (each declares its knobs and lowers to a task graph)."""

GROUPS = {"schedule": "Schedules"}
