#!/bin/bash
export VLLM_USE_V1=1
TP=4
echo "first" --tensor-parallel-size 2
NCCL_NVLS_ENABLE=0 vllm serve meta-llama/Llama-3.1-8B --port 8000 \
  -tp $TP --kv-cache-dtype fp8 > a.log 2>&1 &
TP=8
vllm serve meta-llama/Llama-3.1-8B --port 8001 \
  -tp $TP > b.log 2>&1 &
wait
