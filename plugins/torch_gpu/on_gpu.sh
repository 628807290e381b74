#!/usr/bin/env bash
# Measures the GPU of this machine, and runs emitted and fused operators and kernels in PTX on it, within ten minutes;
# torch is enough. `python -m dse ptx compare data=my_gpu/ptx.csv` then predicts the kernels.
#
#   OUT=my_gpu bash plugins/torch_gpu/on_gpu.sh h100_8      the system whose constants are judged later
#
# Operators are those of the folder `emitted`, or are written there where dse is installed. On one GPU all ranks share it.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root/plugins/torch_gpu:$root/plugins/emit:$root/plugins/ptx:$root" PYTHONUNBUFFERED=1
out=${OUT:-my_gpu} ranks=4 python=${PYTHON:-python3}
mkdir -p "$out"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 3
[ "$gpus" -gt 0 ] || { echo "torch sees no GPU" >&2; exit 3; }
shared=""
[ "$gpus" -ge "$ranks" ] || shared=--one-gpu
if [ ! -d emitted ] && "$python" -c 'import dse_emit.command' 2>/dev/null; then
    "$python" -m dse emit schedule="serial comm_engine=dma" gpus=$ranks m=8192 n=3584 k=8192 out=emitted/in_turn
    "$python" -m dse emit schedule="chunked num_chunks=4 comm_engine=dma" gpus=$ranks m=8192 n=3584 k=8192 out=emitted/chunked
fi
launch() { timeout "$1" "$python" -m torch.distributed.run --nproc-per-node=$ranks -m "${@:2}" $shared; }
for file in emitted/*/gather_gemm.py emitted/*/gemm_reduce.py; do
    [ -f "$file" ] || continue
    module=$(basename "$(dirname "$file")").$(basename "$file" .py)
    echo "{\"operator\": \"$module\", \"outcome\": $(cd emitted && launch 45 "$module" --json 2>>"$out/operators.log" | grep '^{' || echo '"failed"')}"
done | tee "$out/operators.jsonl"
timeout 60 "$python" -m dse_ptx.on_gpu --out "$out/ptx.csv" 2>>"$out/ptx.log"
launch 60 dse_fused.check 2>>"$out/operators.log" | tee "$out/fused.jsonl"
timeout 330 "$python" -m dse_judge --out "$out/tables" --seconds 300 ${1:+--system "$1"} | tee "$out/judge.log"
