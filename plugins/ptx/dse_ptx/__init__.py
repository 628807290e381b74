"""Kernels in PTX: their instructions executed by lanes of warps, and timed on the SMs of a GPU."""

from dse.plugins import Command

RESEARCH = {"dse_ptx": "instructions of kernels, executed and timed without a GPU"}
"""Package -> what is studied there (`dse.plugins`)."""

_OPTIONS = {
    "file": "text of PTX, as clang, Triton or nvcc write it",
    "grid": "blocks, x,y,z",
    "block": "threads of a block, x,y,z",
    "arguments": "names of arrays in `data`, numbers, and tensor maps (a@64x128/128), in the kernel's order",
    "kernel": "of the file (its only one)",
    "data": "file .npz of arrays",
    "shared": "bytes of dynamic shared memory (0)",
    "cluster": "blocks of a cluster, x,y,z (1, or the kernel's)",
    "copies": "when bulk copies come: at_once, or late, which shows waits that are missing (at_once)",
    "most": "warp instructions, at most (1000000000)",
}
BACKENDS = {
    "ptx_memory": "dse_ptx.cache_backend:PtxMemoryBackend",
    "ptx_sms": "dse_ptx.sms_backend:SmsBackend",
}
VERBS = {"ptx": "run PTX without a GPU, and predict its time on one"}
COMMANDS = {
    "ptx compare": Command(
        "dse_ptx.compare_command:compare",
        "ptx compare data=<ptx.csv> [system=h100] [out=<folder>]",
        "hold predicted times of our kernels against those that a GPU measured",
        {
            "data": "table of `python -m dse_ptx.on_gpu`",
            "system": "GPU whose SMs are described, or a YAML file (h100)",
            "out": "folder to write to",
        },
        ("ptx compare data=my_gpu/ptx.csv system=h100",),
    ),
    "ptx run": Command(
        "dse_ptx.commands:run",
        "ptx run file=<ptx> grid=<x,y,z> block=<x,y,z> arguments=<a,b,...> [data=<npz>] [out=<npz>]",
        "execute a kernel in PTX on arrays, and count its instructions",
        {**_OPTIONS, "out": "file .npz for the arrays afterwards"},
        ("ptx run file=saxpy.ptx grid=4 block=256 arguments=2.0,x,y,1000 data=arrays.npz out=after.npz",),
    ),
    "ptx show": Command(
        "dse_ptx.commands:show",
        "ptx show line=<n> file=<ptx> grid=<x,y,z> block=<x,y,z> arguments=<a,b,...> [thread=<x,y,z>] [of=<x,y,z>]",
        "show the registers of a thread of a kernel in PTX before a line",
        {
            **_OPTIONS,
            "line": "of the text",
            "thread": "in its block (0)",
            "of": "block of the thread (0)",
            "visit": "times that the thread has passed the line before (0)",
        },
        ("ptx show line=21 file=saxpy.ptx grid=4 block=256 arguments=2.0,x,y,1000 data=arrays.npz thread=5",),
    ),
    "ptx time": Command(
        "dse_ptx.timing_command:time",
        "ptx time file=<ptx> grid=<x,y,z> block=<x,y,z> arguments=<a,b,...> [system=gtx_1080_ti] [out=<folder>]",
        "time a kernel in PTX on the SMs of a GPU, with its stalls over time",
        {
            **_OPTIONS,
            "system": "GPU whose SMs are described, or a YAML file (gtx_1080_ti)",
            "file": "text of PTX, kernel-1.traceg, or kernelslist.g",
            "blocks": "that are timed, about; 0: all (three waves)",
            "out": "folder to write to",
        },
        ("ptx time file=saxpy.ptx grid=4 block=256 arguments=2.0,x,y,1000 data=arrays.npz system=v100",),
    ),
}
