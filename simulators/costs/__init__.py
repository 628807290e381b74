"""Costs of operators and transfers, isolated and under contention.

gemm: products of matrices, each by one of its models. memory_bound, streaming: operators that the HBM bounds.
convolution, recurrent, pim_bursts: others. transfer: what CUs, copy engines and switches move between GPUs, one
transfer at a time. collective: a whole collective of a step, by the links or as a library was measured; algorithms:
what each GPU sends in it, and in how many steps; collective_software: by software of today; fabric: between nodes;
expert_exchange: tokens to and from experts. sharing: how much longer kernels take beside moved data. chip: what one
kernel can draw of a GPU. power: watts, energy.
"""

from dse.plugins import Command

COMMANDS = {
    "machine libraries": Command(
        "simulators.costs.collective_table:compare_software",
        "machine libraries pattern=<name> | show=<software> [system=h100_8] [gpus=8] [bytes=1MiB,64MiB]",
        "compare software of collectives on a machine: times by size, what each holds, and why others do not run",
        {
            "pattern": "all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or send_recv",
            "show": "in place of it: software, of which all constants are shown with their sources",
            "system": "machine (h100_8)",
            "gpus": "GPUs of one node; default: all",
            "bytes": "of a GPU's larger buffer, one or several (256KiB,1MiB,4MiB,16MiB,64MiB,256MiB)",
            "sizes": "framework: leave out sizes that software gives to other software by default; any: ask it for all",
        },
        (
            "machine libraries pattern=all_reduce system=h100_8",
            "machine libraries pattern=all_gather system=b200_8 gpus=4 bytes=8MiB",
            "machine libraries show=nccl_symmetric",
        ),
    ),
}
GROUPS = {"collective": "Software of collectives"}
