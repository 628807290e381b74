"""Task graphs, the input of an engine: tasks, their order and the resources they share."""

# Kind of a task -> its name and its colour in timelines.
TASK_KINDS = {"gemm": ("GEMM", "#0173b2"), "transfer": ("data arrives", "#de8f05"), "launch": ("launch", "#949494")}
