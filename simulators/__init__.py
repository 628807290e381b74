"""The machine: systems, workloads, operator and transfer costs, task graphs, engines, and backends."""

LOOKS = {
    "dma": ("DMA engines", "vermillion", "X"),
    "cu": ("CUs", "blue", "X"),
    "gpu": ("GPU", "navy", "X"),
    "pcie_switch": ("PCIe switch", "green", "X"),
    "cpu": ("CPU", "amber", "X"),
    "compute": ("compute", "blue", "h"),
    "contention": ("contention", "vermillion", "h"),
    "decomposition": ("decomposition", "sky", "h"),
    "starvation": ("starvation", "amber", "h"),
    "dependency": ("dependency", "wine", "h"),
    "communication": ("communication", "violet", "*"),
}
"""Engine of communication, place of NICs, cause of a loss -> label, colour and marker (`dse.plots.labels`)."""

WORDS = {
    "makespan_s": "makespan",
    "comm_cu_s": "CU time of communication",
    "peak_staging_bytes": "staging buffers",
    "cost_proxy": "hardware cost",
    "energy_j": "energy",
    "mean_w": "mean power",
    "held_clock": "clock held",
    "system.gpu.power.cap_w": "power limit",
    "hbm_bytes": "DRAM traffic",
    "speedup": "speed-up",
    "iteration_s": "time of an iteration",
    "serialized_s": "communication that nothing hides",
    "tokens_per_s_per_gpu": "tokens per second of a GPU",
    "dil": "decomposition inefficiency",
    "cil": "contention inefficiency",
    "comm_cil": "contention inefficiency of the collective",
    "system.gpu.num_cus": "CUs",
    "system.gpu.matrix_flop_per_s_per_cu": "FLOP/s of a CU",
    "system.gpu.gemm.serial_fraction": "serial fraction of GEMMs",
    "system.gpu.dma.num_engines": "DMA engines",
    "system.gpu.dma.bytes_per_s": "rate of a DMA engine",
    "system.gpu.dma.setup_s": "set-up of a DMA copy",
    "system.gpu.cu_copy.bytes_per_s_per_cu": "rate of a CU that copies",
    "system.gpu.cu_copy.setup_s": "set-up of copies by CUs",
    "system.node.num_gpus": "GPUs",
    "system.node.topology": "topology",
    "system.node.link_bytes_per_s": "rate of a link",
    "system.gpu.hbm_bytes_per_s": "memory bandwidth",
    "system.fabric.num_nodes": "nodes",
    "system.fabric.nic.num_nics": "NICs of a node",
    "system.fabric.nic.placement": "place of the NICs",
}
"""Column -> words for it on an axis, where its name does not say it."""

PHRASES = {
    "system.node.topology": "on a {}",
    "system.fabric.nic.placement": {
        "gpu": "NICs at GPUs",
        "pcie_switch": "NICs at PCIe switches",
        "cpu": "NICs at CPUs",
    },
}
"""How values of knobs read in an answer, where their names do not say it (`dse.results.words`)."""

CHECKS = {"kernels": "simulators.compiled:check_cache"}
