"""Kernels measured on the GPU of this machine by PyTorch: a backend, tables that `calibrate` reads, and a judge."""

from dse.plugins import Command

BACKENDS = {"torch_gpu": "dse_torch.backend:TorchBackend"}
COMMANDS = {
    "judge": Command(
        "dse_torch.command:judge",
        "judge system=<name> [minutes=8] [tables=...] | data=<folder> | operators=<folder> [out=my_gpu]",
        "hold predictions against what the GPU of this machine measures",
        {
            "system": "whose constants predict, such as h100_8",
            "minutes": "of measuring, at most (8); the same words again go on where they ended",
            "tables": "names, such as gemms,launches (all)",
            "data": "folder of tables that `python -m dse_judge --out <folder>` measured (torch alone)",
            "operators": "folder that `emit` wrote: run on the GPUs that are there, on one, or on the CPU",
            "out": "folder to write (my_gpu)",
        },
        ("judge system=h100_8 minutes=8", "judge data=tables", "judge operators=my_overlap"),
    ),
}
