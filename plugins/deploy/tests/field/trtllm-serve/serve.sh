#!/usr/bin/env bash
# a file of settings, written here, counts over the command line
cat > ./options.yml <<EOF
cuda_graph_config:
  max_batch_size: 256
enable_attention_dp: true
kv_cache_config:
  dtype: fp8
  free_gpu_memory_fraction: 0.85
EOF
MODEL=${MODEL:-deepseek-ai/DeepSeek-R1}
trtllm-serve $MODEL --host 0.0.0.0 --port 8000 --backend pytorch \
    --max_batch_size 256 --max_num_tokens 4096 \
    --tp_size 8 --ep_size 8 --pp_size 1 \
    --kv_cache_free_gpu_memory_fraction 0.9 \
    --extra_llm_api_options ./options.yml
