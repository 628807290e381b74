"""Search spaces: schedules, each of which declares its knobs and lowers to a task graph."""

GROUPS = {"schedule": "Schedules"}

PHRASES = {
    "schedule.comm_engine": {"dma": "by DMA", "cu": "by CUs"},
    "schedule.comm_cus": "on {} CUs",
    "schedule.comm_cus=0": "on the library's CUs",
    "schedule.num_chunks": "{} chunks",
    "schedule.num_streams": "{} at once",
    "schedule.chunk_dim": {"m": "cut by rows", "k": "cut along K"},
    "schedule.local_shard_first": {"True": "local shard first", "False": ""},
    "schedule.compute": {"fused": "one GEMM a step", "unfused": "a GEMM for each chunk"},
    "schedule.withheld_cus": "{} CUs withheld",
    "schedule.kernels": "by {} kernels",
    "schedule.occupancy_threshold=1000000": "no threshold",
    "schedule.launch_order": {"gemm_first": "GEMM launched first", "comm_first": "collective launched first"},
    "schedule.stream_priority": {"equal": "", "communication": "on a stream of high priority"},
    "schedule.priority": {
        "equal": "",
        "communication": "communication first",
        "compute": "compute first",
    },
}
"""How values of knobs read in an answer, where their names do not say it (`dse.results.words`)."""

LOOKS = {
    "serial": ("serial", "grey", "o"),
    "shard_p2p": ("shard p2p", "wine", "X"),
    "uniform_fused_1d": ("uniform fused 1d", "blue", "o"),
    "uniform_unfused_1d": ("uniform unfused 1d", "sky", "P"),
    "uniform_fused_2d": ("uniform fused 2d", "green", "^"),
    "uniform_unfused_2d": ("uniform unfused 2d", "lime", "v"),
    "hetero_fused_1d": ("hetero fused 1d", "vermillion", "s"),
    "hetero_unfused_1d": ("hetero unfused 1d", "amber", "D"),
    "hetero_fused_2d": ("hetero fused 2d", "navy", "<"),
    "hetero_unfused_2d": ("hetero unfused 2d", "violet", ">"),
    "chunked": ("chunked", "blue", "8"),
    "signalled": ("signalled", "green", "8"),
    "in_switch": ("summed in the switch", "wine", "8"),
    "gathered_in_switch": ("gathered in the switch", "navy", "8"),
    "c3_base": ("concurrent", "grey", "s"),
    "c3_sp": ("concurrent, priority", "sky", "^"),
    "c3_rp": ("concurrent, CUs set apart", "blue", "s"),
    "c3_sp_rp": ("concurrent, priority, CUs set apart", "navy", "D"),
    "conccl": ("offloaded to DMA", "vermillion", "o"),
    "conccl_rp": ("offloaded, CUs withheld", "amber", "P"),
    "t3_sequential": ("sequential", "grey", "D"),
    "t3_sequential_nmc": ("sequential + NMC", "sky", "s"),
    "t3_ideal": ("ideal overlap", "green", "v"),
    "t3_ideal_nmc": ("ideal overlap + NMC", "lime", "^"),
    "t3": ("T3", "blue", "D"),
    "t3_fair": ("T3, fair shares", "amber", "s"),
    "t3_mca": ("T3-MCA", "vermillion", "P"),
    "bulk_sync": ("bulk-synchronous", "grey", "^"),
    "fused_kernels": ("fused kernels", "vermillion", "v"),
    "remote_first": ("remote first", "blue", "p"),
    "local_first": ("local first", "amber", "p"),
    "sequential": ("one after the other", "grey", "v"),
    "default_concurrency": ("default concurrency", "blue", "<"),
    "go_kernels": ("GO kernels", "vermillion", "8"),
    "best_tiles": ("best tiles", "green", "<"),
}
"""Schedule, or choice of its knobs -> its label, colour and marker in figures (`dse.plots.labels`), baselines grey."""

WORDS = {
    "schedule.name": "schedule",
    "schedule.comm_engine": "communication engine",
    "schedule.num_chunks": "chunks",
    "schedule.comm_cus": "CUs of communication",
    "schedule.priority": "priority",
    "schedule.launch_order": "launched first",
    "schedule.stream_priority": "priority of the stream",
    "schedule.chunk_dim": "dimension that is cut",
    "schedule.local_shard_first": "local shard first",
    "schedule.compute": "GEMMs of a step",
    "schedule.withheld_cus": "CUs withheld from the GEMM",
    "schedule.occupancy_threshold": "threshold of waiting requests",
    "schedule.occupancy_loss": "occupancy lost",
    "schedule.num_streams": "GEMMs at once",
    "schedule.kernels": "kernels",
    "schedule.pairs": "what is fused",
}
"""Column -> words for it on an axis, where its name does not say it."""
