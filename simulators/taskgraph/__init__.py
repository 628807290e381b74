"""Task graphs, the input of an engine: tasks, their order and the resources they share."""

LOOKS = {
    "gemm": ("GEMM", "blue", "p"),
    "transfer": ("data arrives", "amber", "p"),
    "launch": ("launch", "grey", "p"),
    "work": ("work", "navy", "p"),
    "waiting": ("waiting", "lime", "p"),
}
"""Kind of a task, cause of time -> its label, colour and marker in figures (`dse.plots.labels`)."""
