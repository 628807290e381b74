"""A recorded run: its kernels, what each of them is, what it waited for, and how long it was hidden.

kernels: the profile itself. texts: what may be kept of a stranger's texts. kernel_names, kernel_classes: what a kernel
does, by its name; unnamed_kernels: those whose names do not tell. shapes: shapes of operators. iterations: ranges that
mark iterations. waits: what each kernel waited for; replay: the task graph of these waits. overlap,
hidden_communication: how much of collectives computation hides. critical_path, path_causes, explanation: where the time
of a run comes from. ranks, rank_streams: several ranks of one run.
"""
