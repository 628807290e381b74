"""Search spaces: schedules, each of which declares its knobs and lowers to a task graph."""

GROUPS = {"schedule": "Schedules"}

PHRASES = {
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

LOOKS = {
    "serial": ("serial", "grey", "o"),
    "shard_p2p": ("shards point to point", "wine", "X"),
    "uniform_fused_1d": ("uniform, fused, 1D", "blue", "o"),
    "uniform_unfused_1d": ("uniform, unfused, 1D", "sky", "P"),
    "uniform_fused_2d": ("uniform, fused, 2D", "green", "^"),
    "uniform_unfused_2d": ("uniform, unfused, 2D", "lime", "v"),
    "hetero_fused_1d": ("hetero, fused, 1D", "vermillion", "s"),
    "hetero_unfused_1d": ("hetero, unfused, 1D", "amber", "D"),
    "hetero_fused_2d": ("hetero, fused, 2D", "navy", "<"),
    "hetero_unfused_2d": ("hetero, unfused, 2D", "violet", ">"),
    "chunked": ("chunked", "blue", "8"),
    "signalled": ("signalled", "green", "8"),
    "c3_base": ("concurrent", "grey", "s"),
    "c3_sp": ("concurrent, priority", "sky", "^"),
    "c3_rp": ("concurrent, CUs set apart", "blue", "s"),
    "c3_sp_rp": ("concurrent, priority, CUs set apart", "navy", "D"),
    "conccl": ("DMA engines", "vermillion", "o"),
    "conccl_rp": ("DMA engines, CUs withheld", "amber", "P"),
    "t3_sequential": ("sequential", "grey", "D"),
    "t3_sequential_nmc": ("sequential + NMC", "sky", "s"),
    "t3_ideal": ("ideal overlap", "green", "v"),
    "t3_ideal_nmc": ("ideal overlap + NMC", "lime", "^"),
    "t3": ("T3", "blue", "D"),
    "t3_fair": ("T3, fair shares", "amber", "s"),
    "t3_mca": ("T3-MCA", "vermillion", "P"),
    "bulk_sync": ("bulk-synchronous", "grey", "^"),
    "fused_kernels": ("fused kernels", "vermillion", "v"),
    "sequential": ("one after the other", "grey", "v"),
    "default_concurrency": ("library's kernels", "blue", "^"),
    "go_kernels": ("kernels tuned for sharing", "vermillion", "D"),
    "best_tiles": ("best kernels", "green", "s"),
}
"""Schedule -> its label, colour and marker in figures (`dse.plots.palette`), baselines grey."""
