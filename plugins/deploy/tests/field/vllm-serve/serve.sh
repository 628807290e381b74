#!/bin/bash
# DeepSeek-V3 on 8 GPUs
export VLLM_ALL2ALL_BACKEND=deepep_low_latency
TP=${TP:-1}
DP=8
NCCL_NVLS_ENABLE=0 vllm serve deepseek-ai/DeepSeek-V3 \
  --tensor-parallel-size ${TP} \
  --data-parallel-size "$DP" --enable-expert-parallel \
  --quantization fp8 --kv-cache-dtype fp8_e4m3 \
  --compilation-config '{"pass_config": {"enable_sp": true, "fuse_gemm_comms": true}, "cudagraph_mode": "FULL"}' \
  --max-model-len 16384 --no-enable-prefix-caching --port 8000
