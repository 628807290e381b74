"""Files of profilers, each format with its reader.

formats: every format, its test and its reader, asked in order; beginnings: what the begin of a file tells. chrome:
PyTorch, with events of XLA and rocprof (xla_events, rocprof_events). nsys, nsys_stats: Nsight Systems. rocprof,
rocprof_json, rocpd: AMD's. chakra_graphs: execution traces of Chakra. kernel_table: CSV. imported_folders: what
`profile import` wrote. json_records, csv_rows, databases: large files piece by piece. foreign: files that hold no
kernel.
"""
