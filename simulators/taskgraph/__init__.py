"""Task graphs, the input of an engine: tasks, their order and the resources they share."""

LOOKS = {
    "gemm": ("GEMM", "blue", "p"),
    "transfer": ("data arrives", "amber", "p"),
    "launch": ("launch", "grey", "p"),
}
"""Kind of a task -> its label, colour and marker in figures (`dse.plots.palette`)."""
