"""Whole files of the kinds that no case of `benchmarks.field` has, each with a command that reads it, for `fuzz`.

With the cases of the field they are what every reader of the project is tried with: recorded runs, tables of times,
settings, manifests, models, machines and schedules are cases; memory traces, logs of epochs, traces of requests, plans,
shapes of GEMMs, traces of instructions, tables of kernels and of a GPU, measurements beside a figure, journals of
Optuna and databases of MLflow are here.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

QUIET = ("tracking=none", "store=none", "figures=none")
_STUDY = ("study=ficco_sweep", "schedule=serial", "fidelity=none", "timeline=false", "executor.jobs=1")
_TRAFFIC = ("serve-plan", "model=llama3_8b", "system=h100_8", "parallel.tp=1", "traffic.arrivals=trace", *QUIET)
_STEP = ("model=llama3_8b", "system=h100_8", "parallel.tp=8", *QUIET)
_STORE = ("store", "sync", "study=ficco_sweep")

_WARP = """0000 ffffffff 1 R1 MOV 0 0
0010 ffffffff 1 R4 LDG.E.64 2 R2 R255 8 1 0x7f0000000000 8
0020 ffffffff 1 R6 FFMA 3 R4 R5 R4 0
0040 ffffffff 0 EXIT 0 0
"""
_SASS = f"""-kernel name = scale
-grid dim = (1,1,1)
-block dim = (32,1,1)
-shmem = 0
-nregs = 16
-accelsim tracer version = 4
#BEGIN_TB
thread block = 0,0,0
warp = 0
insts = 4
{_WARP}#END_TB
"""
_PLAN = """sites: {}
parallel: {sequence_parallel: false, collectives: in_switch}
step: [model=llama3_8b, system=h100_8, run.mode=prefill, parallel.tp=8, stack=vllm]
"""
_SERVING = """parallel: {tp: 1, pp: 1, dp: 1, ep: 1}
run: {precision: bf16}
server:
  name: vllm
  scheduler: {policy: mixed, tokens: 8192, sequences: 256, chunked: true, block: 16, memory: 0.9, context: 131072}
engines: {replicas: 8, apart: false, overlap: waited}
"""
_BLOCKS = (("timestamp", "input_length", "output_length", "hash_ids"), (0, 1024, 20, [1, 2]), (1500, 2048, 9, [1, 3]))
_MOONCAKE = "".join(json.dumps(dict(zip(_BLOCKS[0], row, strict=True))) + "\n" for row in _BLOCKS[1:])
_KERNELS = "collective: [my_all_gather]\nGEMM: [my_gemm]\n"
_PROFILE = "Kernel_Name,Start_Timestamp,End_Timestamp,Stream_Id\nmy_gemm_1,0,1000,1\nmy_all_gather_1,500,1500,2\n"
_PTX = "device,file,kernel,seconds,scatter,magnitude,reason\nNVIDIA H100,lenet,conv_direct,,,,no such device\n"

_TEXTS = {
    "trace.csv": "address,cu,store,bytes,pc,time_ns\n0x1000,0,0,64,1,0\n4096,1,1,64,2,10\n8192,0,0,64,1,20\n",
    "kernelslist.g": "MemcpyHtoD,0x0000000000001000,400\nkernel-1.traceg\n",
    "kernel-1.traceg": _SASS,
    "epoch.csv": "sequence_length,seconds\n" + "".join(f"{10 * place},0.0{place}\n" for place in range(1, 10)),
    "own.csv": "arrival_s,input_tokens,output_tokens,cached_tokens,prefix_id\n0,100,20,0,a\n1.5,200,10,50,a\n",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,374,44\n2023-11-16 18:15:50,39,9\n",
    "mooncake.jsonl": _MOONCAKE,
    "plan.yaml": _PLAN,
    "serving.yaml": _SERVING,
    "shapes.csv": "name,m,n,k\na,4096,4096,4096\nb,8192,4096,2048\n",
    "beside.csv": "scenario,series,value\ng1,mine,1.2\ng4,mine,1.3\n",
    "kernels.yaml": _KERNELS,
    "profile.csv": _PROFILE,
    "ptx.csv": _PTX,
    "times.csv": "device,precision,op,m,n,k,ta,tb,fwd_ms\n"
    + "".join(f"OWN,bf16,gemm,{1024 * place},4096,4096,N,N,{0.07 * place:g}\n" for place in range(1, 9)),
}


@dataclass(frozen=True)
class Reader:
    """A command, and the files that it reads. outputs: whether it is typed beside a finished run. code: its exit
    code, while the files are whole.
    """

    command: tuple[str, ...]
    files: tuple[str, ...]
    outputs: bool = False
    code: int = 0


READERS = {
    "requests of a CSV": Reader(("profile", "memory", "data=trace.csv"), ("trace.csv",)),
    "requests of Parquet": Reader(("profile", "memory", "data=trace.parquet"), ("trace.parquet",)),
    "kernels of Accel-Sim": Reader(("profile", "memory", "data=kernelslist.g"), ("kernelslist.g", "kernel-1.traceg")),
    "an epoch": Reader(("profile", "seqpoint", "data=epoch.csv", "k0=2", "out=points.csv"), ("epoch.csv",)),
    "requests of one's own": Reader((*_TRAFFIC, "traffic.trace=own.csv"), ("own.csv",)),
    "requests of Azure": Reader((*_TRAFFIC, "traffic.trace=azure.csv"), ("azure.csv",)),
    "requests of Mooncake": Reader((*_TRAFFIC, "traffic.trace=mooncake.jsonl"), ("mooncake.jsonl",)),
    "a plan": Reader(("plan", "plan=plan.yaml", *_STEP), ("plan.yaml",)),
    "a plan to export": Reader(("settings", "export", "plan=plan.yaml", "to=megatron"), ("plan.yaml",)),
    "a deployment": Reader(
        ("serve-plan", "plan=serving.yaml", "model=llama3_8b", "system=h100_8", "traffic.requests=20", *QUIET),
        ("serving.yaml",),
    ),
    "shapes of GEMMs": Reader((*_STUDY, *QUIET, "workload.shapes=shapes.csv"), ("shapes.csv",)),
    "measurements beside": Reader((*_STUDY, *QUIET[:2], "workload.only=[g1,g4]", "beside=beside.csv"), ("beside.csv",)),
    "names of kernels": Reader(
        ("profile", "import", "profile=profile.csv", "kernels=kernels.yaml"), ("kernels.yaml", "profile.csv")
    ),
    "a profile to export": Reader(("profile", "export", "profile=profile.csv", "ranks=2"), ("profile.csv",)),
    "instructions of SASS": Reader(("ptx", "time", "file=kernel-1.traceg"), ("kernel-1.traceg",)),
    "kernels of a GPU": Reader(("ptx", "compare", "data=ptx.csv"), ("ptx.csv",), code=2),  # predicting takes minutes
    "a machine": Reader(
        ("machine", "calibrate", "system=machine.yaml", "data=times.csv", "out=fitted"), ("machine.yaml", "times.csv")
    ),
    "a journal of Optuna": Reader((*_STORE, "optuna=trials.log"), ("trials.log",), outputs=True),
    "a database of MLflow": Reader((*_STORE, "uri=sqlite:///mlflow.db"), ("mlflow.db",), outputs=True),
}


def lay_out(folder: Path) -> None:
    """Write every file into a folder, but for the views of a finished run, which commands write (`lay_out_views`)."""
    from dse.config.options import conf_dir

    folder.mkdir(parents=True)
    for name, text in _TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    columns = {"address": np.arange(8) * 64, "cu": np.arange(8) % 2, "store": np.arange(8) % 3 == 0}
    pq.write_table(pa.table(columns), folder / "trace.parquet")
    shutil.copy(conf_dir() / "system" / "h100_8.yaml", folder / "machine.yaml")


def lay_out_views(folder: Path, run: Callable[[Sequence[str]], int]) -> None:
    """Write those views into a folder: the files of commands that are typed beside a finished run. run: types one."""
    for reader in READERS.values():
        if not reader.outputs:
            continue
        if code := run(reader.command):
            raise RuntimeError(f"{reader.command} ended with {code}")
        for name in reader.files:
            if name.endswith(".db"):  # what its log holds is part of it
                with closing(sqlite3.connect(name)) as database:
                    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            shutil.move(name, folder / name)
